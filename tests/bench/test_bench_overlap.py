"""`kvpp bench overlap`: what it makes of its times, and one real run."""

import json
import sys

import pytest

from kvpp_connect.bench import overlap as bench
from kvpp_connect.bench.overlap import (
    OverlapOptions,
    OverlapReport,
    OverlapRow,
    StepShape,
    compare_rounds,
    measure_overlap,
)
from kvpp_connect.bench.rounds import Spread
from kvpp_connect.bench.traffic import BLOCK_BYTES
from kvpp_connect.cli import main as cli


def spread(median_s):
    return Spread(median_s=median_s, least_s=median_s / 2, most_s=median_s * 3)


ROW = OverlapRow(
    step="decode",
    mode="compact",
    transport="shared_memory",
    layer_flops=10,
    layer_bytes=2_000_000,
    off=spread(0.010),
    on=spread(0.011),
    transfer=spread(0.004),
    exposed_s=0.001,
    hidden_share=0.75,
)
REPORT = OverlapReport(options=OverlapOptions(), cores=2, load=0.5, rows=(ROW,))


@pytest.fixture
def kvpp(monkeypatch, capsys):
    """Runs `kvpp bench overlap` with a report of ours; gives stdout and the options."""
    calls = []

    def run(*arguments):
        monkeypatch.setattr(bench, "measure_overlap", lambda *a: calls.append(a) or REPORT)
        monkeypatch.setattr(sys, "argv", ["kvpp", "bench", "overlap", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        return capsys.readouterr().out, calls

    return run


def test_what_is_added_to_the_step_is_exposed_and_the_rest_hidden_round_by_round():
    found = compare_rounds(off=[1.0, 2.0, 10.0], on=[1.5, 3.0, 12.0], alone=[1.0, 2.0, 8.0])
    assert (found["exposed_s"], found["hidden_share"]) == (1.0, 0.5)
    assert found["on"] == Spread(median_s=3.0, least_s=1.5, most_s=12.0)


def test_the_table_shows_the_step_off_and_on_side_by_side(kvpp):
    lines = [" ".join(line.split()) for line in kvpp()[0].splitlines()]
    assert "decode compact shared memory 2.0 10.0 11.0 4.0 75%" in lines


def test_json_holds_the_whole_report(kvpp):
    document = json.loads(kvpp("--json")[0])
    assert document["options"]["steps"][0]["name"] == "decode"
    assert document["rows"][0]["hidden_share"] == pytest.approx(0.75)
    assert document["rows"][0]["on"]["median_s"] == 0.011


def test_every_option_arrives(kvpp):
    _, calls = kvpp(
        *("--ranks", "4", "--layers", "3", "--blocks", "600", "--width", "99", "--rounds", "2"),
        *("--timeout", "5"),
    )
    assert calls == [(OverlapOptions(ranks=4, layers=3, blocks=600, width=99, rounds=2), 5.0)]


@pytest.mark.distributed
def test_a_real_run_times_every_step_in_both_modes_over_both_transports():
    steps = (
        StepShape(name="one", requests=2, tokens=1, history=15),
        StepShape(name="two", requests=1, tokens=17, history=0),
    )
    options = OverlapOptions(layers=3, blocks=8, width=64, rounds=2, steps=steps)
    report = measure_overlap(options, 100)
    sizes = {(row.step, row.mode, row.transport): row.layer_bytes for row in report.rows}
    assert sizes == {
        (step, mode, transport): blocks * BLOCK_BYTES
        for step in ("one", "two")
        for mode, blocks in (("full", 8), ("compact", 2))
        for transport in ("collective", "shared_memory")
    }
    for row in report.rows:
        least, most = row.on.least_s - row.off.most_s, row.on.most_s - row.off.least_s
        assert least <= row.exposed_s <= most
        assert row.off.least_s > 0
        assert row.transfer.least_s > 0
        assert row.on.median_s > 0
