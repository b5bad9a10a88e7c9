"""The judgement and the table of ``kvpp demo pool``."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from kvpp_connect.demo.pool_report import (
    PoolContents,
    PoolReport,
    PoolRowMeasurement,
    judge,
    to_table,
)
from kvpp_connect.demo.verdict import to_json

CONTENTS = PoolContents(
    objects=20, stored_bytes=10_000 + 20 * 64, expected_objects=20, logical_bytes=10_000
)
PLAIN = PoolRowMeasurement(
    name="plain",
    title="plain vLLM",
    tokens=((1, 2), (3, 4), (5, 6)),
    prompt_tokens=300,
    hit_tokens=0,
    expected_hit_tokens=0,
    computed_tokens=300,
    first_token_s=0.5,
    startup_s=30.0,
    requests_s=2.0,
    pool=None,
)
HIT = dataclasses.replace(
    PLAIN,
    name="hit",
    hit_tokens=240,
    expected_hit_tokens=240,
    computed_tokens=60,
    first_token_s=0.1,
    pool=CONTENTS,
)


def report_of(*rows, error=None):
    judged = tuple(judge(row, PLAIN) for row in rows)
    return PoolReport(rows=judged, total_s=100.0, error=error)


def test_equal_tokens_the_counted_hits_and_each_byte_once_are_ok():
    report = report_of(PLAIN, HIT)
    assert report.ok
    assert [row.identical for row in report.rows] == [3, 3]
    assert report.rows[1].bytes_per_kv_byte == 1.128


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dataclasses.replace(HIT, tokens=((1, 2), (3, 9), (5, 6))), "1 of 3 answers differ"),
        (dataclasses.replace(HIT, expected_hit_tokens=256), "256 should have"),
        (dataclasses.replace(HIT, expected_hit_tokens=0), "0 should have"),
        (dataclasses.replace(HIT, computed_tokens=300), "300 prompt tokens were computed"),
        (
            dataclasses.replace(HIT, pool=dataclasses.replace(CONTENTS, objects=19)),
            "19 objects, 20 should",
        ),
        (
            dataclasses.replace(HIT, pool=dataclasses.replace(CONTENTS, stored_bytes=20_000)),
            "20000 bytes, 11280 should",
        ),
    ],
)
def test_each_broken_promise_is_a_failure_that_names_its_row(row, words):
    report = report_of(PLAIN, row)
    assert not report.ok
    (failure,) = report.failures
    assert failure.startswith("hit: ")
    assert words in failure


def test_a_report_with_an_error_or_without_rows_is_not_ok():
    assert not report_of(PLAIN, error="hit: died").ok
    assert not report_of().ok


def test_the_json_holds_one_object_with_all_rows():
    value = json.loads(to_json(report_of(PLAIN, HIT, error="off: died")))
    assert value["ok"] is False
    assert value["error"] == "off: died"
    assert [row["name"] for row in value["rows"]] == ["plain", "hit"]
    assert value["rows"][0]["objects"] is None
    assert value["rows"][1]["objects"] == 20
    assert "\n" not in to_json(report_of(PLAIN))


def test_the_table_shows_verdict_hits_and_contents():
    wrong = dataclasses.replace(HIT, tokens=((1, 2), (3, 9), (5, 6)))
    console = Console(file=io.StringIO(), width=160)
    console.print(to_table(report_of(PLAIN, wrong)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "identical (3 of 3)" in text
    assert "DIFFERENT (2 of 3)" in text
    assert "240 (240)" in text
    assert "60 of 300" in text
    assert "1.1280" in text
