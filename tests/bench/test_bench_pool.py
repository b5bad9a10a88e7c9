"""``kvpp bench pool``: what is counted is exact; times are reported, not tested."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="the connector needs vLLM")

from kvpp_connect.bench.pool import PoolReport
from kvpp_connect.bench.pool_bytes import PoolBytes
from kvpp_connect.bench.pool_lookup import LookupCost
from kvpp_connect.bench.pool_rank import LAYER_BLOCK_BYTES
from kvpp_connect.bench.pool_serving import WarmPrefix
from kvpp_connect.bench.pool_speed import PoolSpeed
from kvpp_connect.bench.rounds import Spread
from kvpp_connect.cli.main import app

QUICK = Spread(median_s=0.01, least_s=0.01, most_s=0.01)
HEADER_BYTES = 64


@pytest.mark.distributed
def test_a_small_run_counts_objects_bytes_and_keys_exactly():
    pytest.importorskip("mooncake")
    sizes = {"layers": 2, "blocks": 6, "rounds": 1, "model-layers": 5, "drafts": 1}
    sizes |= {"owners": "1,3", "lookup-blocks": 20, "lookup-owners": 3}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["bench", "pool", "--json", *words])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["command"] == "bench pool"
    assert value["failures"] == []
    assert value["kv_bytes"] == 6 * 2 * LAYER_BLOCK_BYTES
    assert [speed["way"] for speed in value["speeds"]] == ["put", "load"]
    assert all(speed["raw_ratio"] > 0 for speed in value["speeds"])
    assert all(speed["in_store_s"] > 0 for speed in value["speeds"])
    one, three = value["bytes_stored"]
    logical = 8 * 6 * LAYER_BLOCK_BYTES
    # One rank holds target layers and drafts alike: one object. Three: one each, and the drafts.
    for row, objects in ((one, 8), (three, 8 * 4)):
        assert row["objects"] == objects
        assert row["logical_bytes"] == logical
        assert row["stored_bytes"] == logical + objects * HEADER_BYTES
    assert three["copied_drafts"] == pytest.approx(three["bytes_per_kv_byte"] + 2 / 6)
    everything, nothing = value["lookups"]
    assert (everything["keys"], everything["asked_keys"]) == (60, 60)
    assert (nothing["keys"], nothing["asked_keys"]) == (60, 20)
    assert value["warm_prefixes"] == []
    assert len(value["goals"]) == 4


def make_report(**changes):
    speed = PoolSpeed(
        way="put", kv_bytes_per_s=1e9, path=QUICK, raw=QUICK, in_store_s=0.01, raw_ratio=1.0
    )
    stored = PoolBytes(
        owners=2,
        blocks=1,
        objects=3,
        stored_bytes=1,
        logical_bytes=1,
        bytes_per_kv_byte=1.0001,
        header_share=0.0001,
        copied_drafts=1.1,
    )
    cost = LookupCost(found="all", keys=1, asked_keys=1, lookup=QUICK, raw=QUICK)
    warm = WarmPrefix(
        name="hit",
        title="warm",
        prompt_tokens=8192,
        hit_tokens=8176,
        answers=4,
        identical=4,
        seconds=QUICK,
        plain_ratio=0.1,
    )
    values = {
        "speeds": (speed,),
        "bytes_stored": (stored,),
        "lookups": (cost,),
        "warm_prefixes": (warm,),
    }
    return PoolReport(cores=2, load=0, rounds=1, kv_bytes=1, object_bytes=1, **(values | changes))


def test_goals_are_met_or_missed_by_their_figures():
    report = make_report()
    assert [goal.met for goal in report.goals] == [True, True]
    slow = replace(report.speeds[0], raw_ratio=0.84)
    missed = make_report(speeds=(slow,))
    assert [goal.met for goal in missed.goals] == [False, True]
    # A busy machine is no failure.
    assert missed.failures == ()


def test_bytes_stored_twice_wrong_answers_and_a_cold_pool_are_failures():
    report = make_report()
    twice = replace(report.bytes_stored[0], bytes_per_kv_byte=1.1)
    wrong = replace(report.warm_prefixes[0], identical=3)
    cold = replace(report.warm_prefixes[0], hit_tokens=16)
    first, second, third = make_report(bytes_stored=(twice,), warm_prefixes=(wrong, cold)).failures
    assert first.startswith("bytes stored per KV byte, 2 owners: 1.1")
    assert "1 of 4 answers" in second
    assert "16 of 8192 tokens" in third
