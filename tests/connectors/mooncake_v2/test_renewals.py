"""The plan of renewals: every lease three times within its length, in few questions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.renewals import RenewalPlan
from kvpp_connect.connectors.mooncake_v2.wire import MAX_RENEWALS, LeaseRef


def remote(generation=1, *, host="p", incarnation="i", lease_s=60.0):
    return RemotePrefill(
        engine_id="engine",
        host=host,
        port=1,
        lease=LeaseRef(incarnation=incarnation, request_id=f"r{generation}", generation=generation),
        lease_s=lease_s,
        block_ids=(),
        prompt_tokens=1,
        prompt_digest="",
    )


def test_the_first_renewal_comes_early_and_the_next_after_a_third():
    plan = RenewalPlan()
    plan.keep(remote(), 0.0)
    assert plan.next_due() == 1.0
    assert plan.take_due(0.9) == []
    (batch,) = plan.take_due(1.0)
    assert batch.question().generations == (1,)
    plan.asked(batch, 1.5, succeeded=True)
    assert plan.next_due() == 21.5


def test_a_short_lease_is_renewed_sooner():
    plan = RenewalPlan()
    plan.keep(remote(lease_s=0.9), 0.0)
    assert plan.next_due() == pytest.approx(0.3)


def test_a_failed_question_is_repeated_while_the_lease_holds():
    plan = RenewalPlan()
    plan.keep(remote(lease_s=12), 0.0)
    now, questions = 1.0, 0
    while now < 12:
        (batch,) = plan.take_due(now)
        questions += 1
        now += batch.timeout_s  # no answer
        plan.asked(batch, now, succeeded=False)
        now = plan.next_due()
    assert questions >= 3


def test_leases_of_one_incarnation_share_a_question_and_others_do_not():
    plan = RenewalPlan()
    for generation in range(5):
        plan.keep(remote(generation), 0.0)
    plan.keep(remote(1, incarnation="after a restart"), 0.0)
    plan.keep(remote(1, host="q", incarnation="another engine"), 0.0)
    questions = [(b.address, b.incarnation, b.question().generations) for b in plan.take_due(1)]
    assert questions == [
        (("p", 1), "i", (0, 1, 2, 3, 4)),
        (("p", 1), "after a restart", (1,)),
        (("q", 1), "another engine", (1,)),
    ]


def test_a_forged_hand_over_that_names_anothers_lease_stops_nobodys_renewals():
    plan = RenewalPlan()
    plan.keep(remote(1, host="forged"), 0.0)
    plan.keep(remote(1), 0.0)
    assert [batch.address for batch in plan.take_due(1)] == [("forged", 1), ("p", 1)]


def test_a_question_under_way_is_not_asked_again():
    plan = RenewalPlan()
    plan.keep(remote(), 0.0)
    (batch,) = plan.take_due(1.0)
    plan.keep(remote(), 1.0)
    assert plan.take_due(1e6) == []
    plan.asked(batch, 1e6, succeeded=True)
    assert len(plan.take_due(2e6)) == 1


def test_a_dropped_lease_is_asked_about_no_more():
    plan = RenewalPlan()
    plan.keep(remote(), 0.0)
    (batch,) = plan.take_due(1.0)
    assert plan.drop(("p", 1), remote().lease)
    plan.asked(batch, 1.0, succeeded=True)
    assert (len(plan), plan.next_due()) == (0, float("inf"))
    assert not plan.drop(("p", 1), remote().lease)


def test_many_leases_are_cut_into_questions_of_bounded_size():
    plan = RenewalPlan()
    for generation in range(2 * MAX_RENEWALS + 1):
        plan.keep(remote(generation), 0.0)
    sizes = [len(batch.leases) for batch in plan.take_due(1.0)]
    assert sizes == [MAX_RENEWALS, MAX_RENEWALS, 1]


@given(
    lengths=st.lists(st.floats(1, 100), min_size=1, max_size=10),
    answer_after_s=st.floats(0, 0.02),
)
def test_while_answers_come_no_lease_waits_longer_than_half_its_length(lengths, answer_after_s):
    plan = RenewalPlan()
    remotes = {r.lease: r for r in (remote(n, lease_s=s) for n, s in enumerate(lengths))}
    renewed = dict.fromkeys(remotes, 0.0)
    for each in remotes.values():
        plan.keep(each, 0.0)
    now = 0.0
    for _ in range(50):
        now = plan.next_due()
        for batch in plan.take_due(now):
            for lease in batch.leases:
                assert now - renewed[lease] <= remotes[lease].lease_s / 2
                renewed[lease] = now + answer_after_s
            plan.asked(batch, now + answer_after_s, succeeded=True)


def test_another_length_of_the_same_lease_changes_nothing():
    plan = RenewalPlan()
    plan.keep(remote(), 0.0)
    plan.keep(replace(remote(), lease_s=0.3), 0.0)
    assert plan.next_due() == 1.0
