import pytest
from planning_tools import MLA, named, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import CacheOptions
from kvpp_connect.planning.compare import Expected, compare_logs, expect
from kvpp_connect.planning.geometry import ParallelSizes

NAMES = ("before.log", "after.log")


def line(tokens, concurrency, length=2048):
    return (
        f"CPU KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} tokens per "
        f"request: {concurrency}x"
    )


PLAIN = line(14464, "7.06")


def test_the_ratio_is_after_over_before():
    compared = compare_logs(PLAIN, line(17360, "8.48"), NAMES)
    assert compared.ratio == pytest.approx(1.2, abs=1e-3)
    assert compared.concurrency_ratio == pytest.approx(8.48 / 7.06)
    assert compared.verdict == "x1.200 of the capacity before"


@pytest.mark.parametrize("after", [PLAIN, line(7000, "3.42")])
def test_no_better_means_keep_the_simpler_layout(after):
    assert "keep the simpler layout" in compare_logs(PLAIN, after, NAMES).verdict


def test_requests_of_different_lengths_do_not_compare():
    compared = compare_logs(PLAIN, line(17360, "16.95", 1024), NAMES)
    assert compared.concurrency_ratio is None
    assert compared.ratio is not None
    assert "different --max-model-len" in compared.notes[0]


def test_a_log_of_no_server_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"after\.log: no line says"):
        compare_logs(PLAIN, "Traceback", NAMES)


def test_block_counts_alone_do_not_compare():
    compared = compare_logs("# GPU blocks: 10, # CPU blocks: 1", PLAIN, NAMES)
    assert compared.ratio is None
    assert compared.verdict == "the logs do not state enough to compare"


@pytest.fixture
def expected(tmp_path):
    def build(**changes):
        values = {
            "model": read_model(write_config(tmp_path / "tiny", MLA), environment={}),
            "sizes": ParallelSizes(tensor=2),
            "layout": "full",
            "options": CacheOptions(device="cpu", dtype="float32"),
        }
        return Expected(**values | changes)

    return build


def test_the_expected_ratio_is_that_of_the_plan(expected):
    compared = compare_logs(PLAIN, line(17360, "8.48"), NAMES)
    found = expect(compared, expected())
    assert found.memory_bytes == 904 * 6 * 16 * 576 * 4
    assert found.ratio == pytest.approx(compared.ratio, rel=2e-3)


def test_compact_with_the_running_tokens_of_a_real_server(expected):
    compared = compare_logs(line(8672, "4.23"), line(15760, "7.70"), NAMES)
    found = expect(compared, expected(layout="compact", running_tokens=2400))
    assert found.ratio == pytest.approx(compared.ratio, rel=2e-3)


def test_a_layout_that_the_model_does_not_allow_is_refused(expected):
    compared = compare_logs(PLAIN, PLAIN, NAMES)
    qwen = expected(model=named("Qwen3-32B"), options=CacheOptions())
    with pytest.raises(ConfigError, match=r"full is not possible here: .*no KVPP"):
        expect(compared, qwen)


def test_a_log_without_tokens_gives_no_memory(expected):
    compared = compare_logs("# GPU blocks: 10, # CPU blocks: 1", PLAIN, NAMES)
    with pytest.raises(ConfigError, match="no memory can be derived"):
        expect(compared, expected())
