"""After a reset nothing that was stored or computed before is ever used, or stored as if new."""

import pytest

pytest.importorskip("vllm")

from pool_scheduling import Scheduling, names_of, prompt, stage_shards


@pytest.fixture
def engine():
    return Scheduling()


def test_a_reset_goes_on_under_keys_of_its_own_and_removes_the_old_objects(engine):
    old = engine.step().scope
    assert engine.side.reset()
    new = engine.step().scope
    assert new != old
    assert new.rsplit(":", 1)[1] == old.rsplit(":", 1)[1], "the layout is as it was"
    assert engine.lookups.forgotten == [old]
    assert engine.side.reset()
    assert engine.step().scope not in (old, new)


def test_two_engines_that_are_reset_do_not_meet_again(engine):
    other = Scheduling()
    assert engine.side.reset()
    assert other.side.reset()
    assert engine.step().scope != other.step().scope


def test_an_answer_about_the_old_objects_is_not_used(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.lookups.answer(5)
    assert engine.side.matched_tokens(request, 0)[0]
    engine.side.reset()
    assert engine.side.matched_tokens(request, 0) == (None, False)
    assert engine.lookups.asked[-1].scope == engine.step().scope
    engine.lookups.answer(0)
    assert engine.side.matched_tokens(request, 0) == (0, False)


def test_requests_that_are_alive_are_not_stored_and_later_ones_are(engine):
    old = engine.arrive("old", prompt(4))
    engine.admit(old)
    engine.step({old: 8})
    engine.side.reset()
    assert engine.step({old: 8}).puts == ()
    new = engine.arrive("new", prompt(2, seed=1))
    engine.admit(new)
    (order,) = engine.step({new: 8}).puts
    assert order.blocks.hashes == tuple(names_of(prompt(2, seed=1)))


def test_a_reset_is_refused_while_requests_are_being_loaded(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    scope = engine.step().scope
    assert not engine.side.reset()
    assert engine.step().scope == scope
    engine.report(received=["r"])
    assert engine.side.reset()
    assert engine.step().scope != scope


def test_puts_that_are_held_back_are_not_stored_under_the_new_keys():
    engine = Scheduling(load_mode="sync")
    request = engine.arrive(tokens=prompt(4))
    engine.admit(request, hit=2)
    engine.step({request: 8}, sync_loads=True)
    engine.report()
    assert engine.side.reset()
    assert engine.step().puts == ()
    assert engine.pins.pinned == {}
    assert not engine.side.has_pending_work


def test_blocks_that_ranks_still_copy_are_given_back_after_a_reset_as_ever(engine):
    request = engine.arrive(tokens=prompt(2))
    engine.admit(request)
    (order,) = engine.step({request: 8}).puts
    assert engine.side.reset()
    assert engine.pins.pinned
    engine.stored(order)
    assert engine.pins.pinned == {}


def test_a_reset_before_the_workers_have_described_themselves_counts_as_well():
    engine, plain = Scheduling(described=False), Scheduling(described=False)
    assert engine.side.reset()
    for each in (engine, plain):
        each.report(stages=[stage_shards()])
    assert engine.step().scope != plain.step().scope
    assert engine.lookups.forgotten == []
