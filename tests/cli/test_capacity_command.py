import pytest
from planning_tools import MLA, write_config

LINE = (
    "(EngineCore pid=7) INFO 11-30 03:41:13 [kv_cache_utils.py:2327] CPU KV cache size: {} tokens, "
    "Maximum concurrency for 2,048 tokens per request: {}x\n"
)


@pytest.fixture
def logs(tmp_path):
    before, after = tmp_path / "before.log", tmp_path / "after.log"
    before.write_text(LINE.format("14,464", "7.06"))
    after.write_text(LINE.format("17,360", "8.48"))
    return before, after


def test_the_ratio_of_two_logs(kvpp, logs):
    done = kvpp("capacity", *logs)
    assert done.code == 0
    assert "x1.200 of the capacity before" in done.stdout
    document = kvpp("capacity", *logs, "--json").document
    assert document["ratio"] == pytest.approx(17360 / 14464)
    assert [log["tokens"] for log in document["logs"]] == [14464, 17360]
    assert document["expected"] is None


def test_the_expected_ratio_where_the_config_is_given(kvpp, logs, tmp_path):
    config = write_config(tmp_path / "tiny", MLA)
    arguments = ("--config", config, "--tp", "2", "--layout", "full")
    arguments += ("--device", "cpu", "--dtype", "float32")
    assert "expected x1.199 (full" in kvpp("capacity", *logs, *arguments).stdout
    document = kvpp("capacity", *logs, *arguments, "--json").document
    assert document["expected"]["ratio"] == pytest.approx(document["ratio"], rel=2e-3)


def test_a_log_that_is_none_is_one_line(kvpp, logs, tmp_path):
    empty = tmp_path / "empty.log"
    empty.write_text("")
    for path, message in ((empty, "no line says"), (tmp_path / "absent", "cannot be read")):
        done = kvpp("capacity", logs[0], path)
        assert done.code == 1
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_no_better_says_so(kvpp, logs):
    assert "keep the simpler layout" in kvpp("capacity", logs[1], logs[0]).stdout
