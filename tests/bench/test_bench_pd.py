"""``kvpp bench pd``: what is counted is exact; times are reported, not tested."""

from dataclasses import replace

import pytest

pytest.importorskip("zmq")

from kvpp_connect.bench.pd import PdOptions, PdReport
from kvpp_connect.bench.pd_plan import LAYERS, TOKEN_BYTES, TOKENS, PlanCost, measure_plans
from kvpp_connect.bench.pd_pull import PullSetting, PullSpeed, measure_pulls
from kvpp_connect.bench.pd_serving import FirstToken
from kvpp_connect.bench.rounds import Spread

SETTING = PullSetting(tokens=256, layers=4, rounds=1, limit_s=60)
QUICK = Spread(median_s=0.01, least_s=0.01, most_s=0.01)


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_contiguous_blocks_are_one_descriptor_per_component_and_scattered_ones_one_per_block(
    block_tokens,
):
    contiguous, scattered = measure_plans((block_tokens,), rounds=1)
    assert contiguous.descriptors == LAYERS * len(TOKEN_BYTES)
    assert scattered.descriptors == contiguous.descriptors * TOKENS // block_tokens


@pytest.mark.distributed
def test_each_byte_leaves_the_prefill_node_once_and_in_direct_mode_once_per_rank():
    pytest.importorskip("mooncake")
    pulls = {(p.ranks, p.mode, p.blocks): p for p in measure_pulls(SETTING, (1, 2))}
    counted = {
        (ranks, mode): (p.producer_bytes_per_kv_byte, p.peer_bytes_per_kv_byte)
        for (ranks, mode, _), p in pulls.items()
    }
    assert counted == {(1, "direct"): (1, 0), (2, "direct"): (2, 0), (2, "shared"): (1, 1)}
    assert pulls[1, "direct", "scattered"].pieces == SETTING.layers * SETTING.blocks
    assert pulls[1, "direct", "contiguous"].pieces == SETTING.layers
    assert pulls[1, "direct", "contiguous"].raw_ratio > 0


def make_report(**changes):
    pull = PullSpeed(
        ranks=1,
        mode="direct",
        blocks="contiguous",
        pieces=4,
        pull=QUICK,
        kv_bytes_per_s=1e9,
        raw=QUICK,
        raw_ratio=1.0,
        producer_bytes_per_kv_byte=1.0,
        peer_bytes_per_kv_byte=0.0,
    )
    plan = PlanCost(block_tokens=64, blocks="scattered", descriptors=1, route_s=0.01, plan=QUICK)
    values = {"pulls": (pull,), "plans": (plan,), "first_tokens": ()}
    return PdReport(cores=2, load=0.0, rounds=1, kv_bytes=1, **(values | changes))


def test_goals_are_met_or_missed_by_their_figures():
    report = make_report()
    assert [goal.met for goal in report.goals] == [True, True, True]
    slow = replace(report.pulls[0], raw_ratio=0.89)
    slow_plan = replace(report.plans[0], plan=replace(QUICK, median_s=0.21))
    missed = make_report(pulls=(slow,), plans=(slow_plan,))
    assert [goal.met for goal in missed.goals] == [False, True, False]
    # A busy machine is no failure.
    assert missed.failures == ()


def test_bytes_that_leave_twice_and_wrong_answers_are_failures():
    twice = replace(make_report().pulls[0], ranks=2, mode="shared", producer_bytes_per_kv_byte=2.0)
    wrong = FirstToken(name="pd", title="P/D", answers=3, identical=2, seconds=QUICK)
    first, second = make_report(pulls=(twice,), first_tokens=(wrong,)).failures
    assert "TP=2" in first
    assert "1 of 3" in second


def test_the_default_is_a_pull_of_more_than_100_mb():
    default = PdOptions(setting=PullSetting(tokens=2048, layers=28, rounds=1, limit_s=1))
    assert default.setting.kv_bytes > 100e6
    assert default.ranks == (1, 2, 4)
