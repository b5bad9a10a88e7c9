"""`kvpp bench broadcast`: what it prints and judges, without processes; and one real run."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from kvpp_connect.bench import broadcast as bench
from kvpp_connect.bench import plots
from kvpp_connect.bench.broadcast import (
    BroadcastReport,
    SizeSpeed,
    TransportSpeed,
    measure_broadcast,
)
from kvpp_connect.bench.rounds import Spread
from kvpp_connect.bench.traffic import BLOCK_BYTES, BLOCKS, LAYERS, REQUESTS, StepBytes
from kvpp_connect.cli import main as cli
from kvpp_connect.errors import KvppError


def spread(median_s):
    return Spread(median_s=median_s, least_s=median_s / 2, most_s=median_s * 3)


def transport_speed(name, seconds):
    return TransportSpeed(
        transport=name,
        stream=spread(seconds),
        latency=spread(seconds * 2),
        bytes_per_s=1e6 / seconds,
        copy_ratio=1e-4 / seconds,
    )


STEP = StepBytes(
    mode="compact",
    requests=4,
    active_blocks=18,
    broadcasts=LAYERS,
    moved_bytes=18 * BLOCK_BYTES * LAYERS,
    planned_bytes=18 * BLOCK_BYTES * LAYERS,
)
REPORT = BroadcastReport(
    ranks=2,
    device="cpu",
    sharing=False,
    cores=2,
    load=0.25,
    rounds=7,
    sizes=(
        SizeSpeed(
            size_bytes=1_000_000,
            copy=spread(1e-4),
            copy_bytes_per_s=1e10,
            transports=(
                transport_speed("collective", 1e-3),
                transport_speed("shared_memory", 1.25e-4),
            ),
        ),
    ),
    steps=(STEP,),
)


@pytest.fixture
def kvpp(monkeypatch, capsys):
    """Runs `kvpp bench broadcast` with a report of ours; gives code, stdout and the call."""
    calls = []

    def run(*arguments, report=REPORT):
        monkeypatch.setattr(bench, "measure_broadcast", lambda *a: calls.append(a) or report)
        monkeypatch.setattr(sys, "argv", ["kvpp", "bench", "broadcast", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err, calls

    return run


def test_the_defaults_are_two_ranks_and_4_kib_to_64_mib(kvpp):
    code, _, _, calls = kvpp()
    assert code == 0
    assert calls == [(2, tuple(4096 * 4**power for power in range(8)), 7, 300.0, "cpu")]


def test_every_option_arrives(kvpp):
    sizes = ("--sizes", "64KiB,1MB", "--rounds", "3", "--timeout", "9")
    _, _, _, calls = kvpp("--ranks", "4", *sizes, "--device", "cuda")
    assert calls == [(4, (65536, 1_000_000), 3, 9.0, "cuda")]


def test_the_device_is_named_and_one_that_is_not_known_is_refused(kvpp):
    _, out, _, _ = kvpp(report=replace(REPORT, device="NVIDIA H200"))
    assert out.startswith("2 ranks on NVIDIA H200, load")
    _, out, _, _ = kvpp(report=replace(REPORT, device="NVIDIA H200", sharing=True))
    assert out.startswith("2 ranks on NVIDIA H200 (shared, so over gloo), load")
    code, _, err, _ = kvpp("--device", "tpu")
    assert code == 1
    assert "--device is 'tpu'; expected one of: cpu, cuda, npu" in err


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_the_device_says_so():
    with pytest.raises(KvppError, match=r"rank . of the benchmark failed: torch .* no cuda device"):
        measure_broadcast(2, (4096,), 1, 60, "cuda")


def test_json_holds_the_whole_report(kvpp):
    code, out, _, _ = kvpp("--json")
    document = json.loads(out)
    assert code == 0
    assert (document["command"], document["ranks"], document["failures"]) == (
        "bench broadcast", 2, [],
    )  # fmt: skip
    size = document["sizes"][0]
    assert size["copy"] == {"median_s": 1e-4, "least_s": 5e-5, "most_s": pytest.approx(3e-4)}
    assert [speed["transport"] for speed in size["transports"]] == ["collective", "shared_memory"]
    assert size["transports"][1]["copy_ratio"] == pytest.approx(0.8)
    assert document["steps"][0]["moved_bytes"] == 18 * BLOCK_BYTES * LAYERS


def test_the_table_shows_speeds_ratios_and_times(kvpp):
    _, out, _, _ = kvpp()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "976.56 KiB plain copy 10.00 GB/s 100 (50 to 300)" in lines
    assert "shared memory 8.00 GB/s 0.80 125 (62 to 375) 250 (125 to 750)" in lines
    assert "compact 4 18 6 3,981,312 3,981,312" in lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moved_bytes": 5}, "compact, 4 requests: moved 5 bytes, planned 3981312"),
        ({"broadcasts": 7}, "compact, 4 requests: 7 broadcasts for 6 layers"),
    ],
)
def test_other_bytes_than_planned_are_a_failure(kvpp, change, said):
    wrong = replace(REPORT, steps=(STEP, replace(STEP, **change)))
    code, out, _, _ = kvpp("--json", report=wrong)
    assert code == 1
    assert json.loads(out)["failures"] == [said]
    code, out, _, _ = kvpp(report=wrong)
    assert code == 1
    assert said in out


def test_a_picture_without_matplotlib_is_one_line_before_any_work(kvpp, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err, calls = kvpp("--plot", str(tmp_path / "out.png"))
    assert (code, out, calls) == (1, "", [])
    assert err.startswith("kvpp: --plot needs matplotlib")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sizes", "64apples"), "--sizes is '64apples'"),
        (("--sizes", "64KiB,"), "--sizes is ''"),
        (("--sizes", "2GiB"), "expected at most 1GiB"),
    ],
)
def test_wrong_sizes_are_one_line(kvpp, arguments, said):
    code, _, err, calls = kvpp(*arguments)
    assert (code, calls) == (1, [])
    assert said in err
    assert err.count("\n") == 1


def test_a_picture_has_both_panels(tmp_path):
    pytest.importorskip("matplotlib", reason="an extra")
    plots.check_plots(tmp_path / "out.png")
    plots.plot_broadcast(REPORT, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.distributed
def test_a_real_run_moves_the_planned_bytes_on_every_transport():
    report = measure_broadcast(3, (4096, 1 << 20), 1, 100)
    assert report.failures == ()
    planned = {
        (step.mode, step.requests): (step.broadcasts, step.moved_bytes) for step in report.steps
    }
    for requests in REQUESTS:
        assert planned["full", requests] == (LAYERS, BLOCKS * BLOCK_BYTES * LAYERS)
        active = 2 + 4 * requests  # of six blocks each, two are everybody's
        assert planned["compact", requests] == (LAYERS, active * BLOCK_BYTES * LAYERS)
    for size in report.sizes:
        assert size.copy.least_s > 0
        for speed in size.transports:
            assert 0 < speed.stream.least_s <= speed.stream.median_s <= speed.stream.most_s
            assert speed.latency.median_s > 0
