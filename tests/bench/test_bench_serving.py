"""The workload and the options of ``kvpp bench serving``; the servers themselves are e2e."""

import pytest
from typer.testing import CliRunner

from kvpp_connect.bench.serving import ServingOptions, ServingReport, ServingRow, make_rounds
from kvpp_connect.cli.main import app


def row(**changes):
    values = {
        "name": "compact",
        "running_tokens": None,
        "cached_tokens": 100,
        "seconds": (1.0,),
        "plain_ratio": 1.0,
        "preemptions": 0,
        "identical": 20,
        "answers": 20,
    }
    return ServingRow(**(values | changes))


def test_every_round_has_new_prompts_of_the_stated_lengths():
    rounds = make_rounds(ServingOptions(rounds=3))
    prompts = [prompt for prompts in rounds for prompt in prompts]
    assert len(prompts) == len(set(prompts)) == 60
    assert all(114 <= len(prompt) <= 763 for prompt in prompts)
    assert rounds == make_rounds(ServingOptions(rounds=3))


def test_answers_that_differ_are_a_failure():
    report = ServingReport(options=ServingOptions(), rows=(row(), row(name="full", identical=19)))
    assert report.failures == ("full: 1 of 20 answers differ from plain",)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("1600,many", "expected numbers of tokens or default"),
        ("1600,1600", "names a size twice: compact-1600, compact-1600"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_before_anything_starts(sizes, message):
    done = CliRunner().invoke(app, ["bench", "serving", "--running-tokens", sizes])
    assert done.exit_code == 1
    assert message in str(done.exception)
