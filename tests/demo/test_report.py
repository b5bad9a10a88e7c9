import dataclasses
import io
import json

import pytest
from rich.console import Console

from kvpp_connect.demo.report import (
    DemoReport,
    PullCounters,
    RowMeasurement,
    judge,
    to_table,
)
from kvpp_connect.demo.verdict import to_json

PER_TOKEN = 6 * 576 * 4
PLAIN = RowMeasurement(
    name="plain",
    title="plain vLLM",
    tokens=((1, 2), (3, 4), (5, 6)),
    prompt_tokens=300,
    kv_cache_line="CPU KV cache size: 10,000 tokens",
    kv_cache_tokens=10_000,
    kvpp_ranks=None,
    layers=6,
    startup_s=30.0,
    requests_s=2.0,
    pull=None,
)
KVPP = dataclasses.replace(PLAIN, name="kvpp", kvpp_ranks=2, kv_cache_tokens=12_000)
PULLED = PullCounters(pulled_bytes=320 * PER_TOKEN, pulled_tokens=300, bytes_per_token=PER_TOKEN)
PD = dataclasses.replace(KVPP, name="pd", pull=PULLED)


def report_of(*rows, error=None):
    judged = tuple(judge(row, PLAIN) for row in rows)
    return DemoReport(rows=judged, total_s=100.0, error=error)


def test_equal_tokens_the_right_capacity_and_a_real_pull_are_ok():
    report = report_of(PLAIN, KVPP, PD)
    assert report.ok
    assert [row.identical for row in report.rows] == [3, 3, 3]
    assert report.rows[1].kv_cache_ratio == 1.2
    assert report.rows[2].logical_bytes == 300 * PER_TOKEN


def test_compact_is_held_against_the_formula_with_its_share_of_scratch():
    compact = dataclasses.replace(KVPP, scratch_share=0.25, kv_cache_tokens=17_143)
    assert report_of(PLAIN, compact).ok
    assert not report_of(PLAIN, dataclasses.replace(compact, scratch_share=1.0)).ok


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dataclasses.replace(KVPP, tokens=((1, 2), (3, 9), (5, 6))), "1 of 3 answers differ"),
        (dataclasses.replace(KVPP, kv_cache_tokens=10_000), "formula"),
        (dataclasses.replace(KVPP, kv_cache_tokens=20_000), "formula"),
        (
            dataclasses.replace(PD, pull=dataclasses.replace(PULLED, pulled_bytes=0)),
            "pulled nothing",
        ),
        (
            dataclasses.replace(PD, pull=dataclasses.replace(PULLED, pulled_tokens=0)),
            "pulled nothing",
        ),
        (
            dataclasses.replace(PD, pull=dataclasses.replace(PULLED, pulled_bytes=PER_TOKEN)),
            "less than",
        ),
        (
            dataclasses.replace(
                PD,
                pull=dataclasses.replace(PULLED, pulled_tokens=301, pulled_bytes=400 * PER_TOKEN),
            ),
            "301 tokens",
        ),
    ],
)
def test_each_broken_promise_is_a_failure_that_names_its_row(row, words):
    report = report_of(PLAIN, row)
    assert not report.ok
    (failure,) = report.failures
    assert failure.startswith(f"{row.name}: ")
    assert words in failure


def test_a_capacity_that_only_misses_by_whole_blocks_is_accepted():
    assert report_of(PLAIN, dataclasses.replace(KVPP, kv_cache_tokens=11_984)).ok


def test_a_row_with_fewer_answers_than_plain_is_our_bug():
    with pytest.raises(ValueError, match="zip"):
        judge(dataclasses.replace(KVPP, tokens=((1, 2),)), PLAIN)


def test_a_report_with_an_error_or_without_rows_is_not_ok():
    assert not report_of(PLAIN, error="decode: died").ok
    assert not report_of().ok


def test_the_json_holds_one_object_with_all_rows():
    value = json.loads(to_json(report_of(PLAIN, KVPP, PD, error="router: died")))
    assert value["ok"] is False
    assert value["error"] == "router: died"
    assert [row["name"] for row in value["rows"]] == ["plain", "kvpp", "pd"]
    assert value["rows"][2]["pulled_bytes"] == 320 * PER_TOKEN
    assert value["rows"][0]["pulled_bytes"] is None
    assert "\n" not in to_json(report_of(PLAIN))


def test_the_table_shows_verdict_ratio_and_bytes():
    wrong = dataclasses.replace(KVPP, tokens=((1, 2), (3, 9), (5, 6)))
    console = Console(file=io.StringIO(), width=160)
    console.print(to_table(report_of(PLAIN, wrong, PD)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "identical (3 of 3)" in text
    assert "DIFFERENT (2 of 3)" in text
    assert "1.20 (1.20)" in text
    assert "4.4 / 4.1 MB = 1.07" in text
