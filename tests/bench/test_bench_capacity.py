"""``kvpp bench capacity``: the planned half; servers are measured with --measure only."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpp_connect.bench import plots
from kvpp_connect.bench.capacity import CapacityReport, MeasuredCapacity, plan_ratios
from kvpp_connect.cli.main import app
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import capacity_ratio

EXAMPLES = Path(__file__).parents[1] / "examples"


def measured(variant, served, planned, ranks=2):
    return MeasuredCapacity(
        ranks=ranks,
        variant=variant,
        served_tokens=served,
        planned_tokens=planned,
        plain_ratio=served / 100,
        planned_ratio=planned / 100,
        limit=ranks,
    )


def test_equal_layers_give_the_formula_with_its_share_of_scratch():
    """DeepSeek-R1: 61 equal layers; a rank of eight owns at most eight of them."""
    (row,) = plan_ratios([EXAMPLES / "DeepSeek-R1"], [8], [0.1, 0.25])
    assert row.limit == pytest.approx(61 / 8, abs=1e-3)
    assert row.full == pytest.approx(capacity_ratio(61, 8), abs=1e-3)
    wanted = [capacity_ratio(61, 8, share) for share in (0.1, 0.25)]
    assert row.compact == pytest.approx(wanted, abs=1e-3)


def test_a_model_without_mla_is_refused():
    with pytest.raises(ConfigError, match="no MLA"):
        plan_ratios([EXAMPLES / "Qwen3-32B"], [2], [])


def test_a_server_that_holds_other_than_planned_is_a_failure():
    row = measured("full", 160, 176)
    report = CapacityReport(shares=(), planned=(), measured=(row,))
    assert report.failures == ("full on 2 ranks: 160 tokens, planned are 176",)


def test_the_document_holds_a_row_for_each_model_and_size():
    arguments = ["bench", "capacity", str(EXAMPLES / "GLM-5"), "--ranks", "4,8", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [row["ranks"] for row in document["planned"]] == [4, 8]
    assert document["planned"][1]["full"] == 6.5


def test_the_picture_shows_limit_formula_and_what_servers_hold(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure", reason="an extra")
    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    report = CapacityReport(
        shares=(0.1,),
        planned=plan_ratios([EXAMPLES / "GLM-5"], [4, 8], [0.1]),
        measured=(
            measured("full", 240, 250, ranks=4),
            measured("full", 380, 390, ranks=8),
            measured("compact", 340, 350, ranks=4),
            measured("compact", 580, 590, ranks=8),
        ),
    )
    plots.plot_capacity(report, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    panels = [
        {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        for axes in drawn[0].axes
    ]
    assert panels[0].keys() == {"limit", "full", "compact, f = 0.1"}
    assert panels[0]["full"][1] == [8, 6.5]
    assert panels[1] == {
        "limit": [[4, 4], [8, 8]],
        "compact: formula": [[4, 3.5], [8, 5.9]],
        "compact: measured": [[4, 3.4], [8, 5.8]],
        "full: formula": [[4, 2.5], [8, 3.9]],
        "full: measured": [[4, 2.4], [8, 3.8]],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["--measure", "--ranks", "1"], "--ranks is '1'; expected whole numbers from 2 to 256"),
        (["--measure", "--ranks", "2,two"], "--ranks is '2,two'"),
        (["--measure", "--shares", "1.5"], "--shares is '1.5'; expected numbers from 0 to 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(arguments, message):
    done = CliRunner().invoke(app, ["bench", "capacity", *arguments])
    assert done.exit_code == 1
    assert message in str(done.exception)
