from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef, LeaseState

LEASE_S = 10.0
MAX_LEASE_S = 35.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


def book():
    clock = Clock()
    return LeaseBook("inc", LEASE_S, MAX_LEASE_S, clock), clock


def test_a_release_frees_once_and_repeats_its_answer():
    leases, _ = book()
    ref = leases.grant("r")
    assert leases.confirm(ref) is LeaseState.HELD
    assert leases.release(ref) is LeaseState.RELEASED
    assert leases.release(ref) is LeaseState.RELEASED
    assert leases.take_ended() == ["r"]
    assert leases.take_ended() == []


def test_an_expiry_is_final():
    leases, clock = book()
    ref = leases.grant("r")
    clock.now = LEASE_S
    assert leases.release(ref) is LeaseState.EXPIRED
    assert leases.confirm(ref) is LeaseState.EXPIRED
    assert leases.take_ended() == ["r"]


def test_a_renewal_counts_from_now_on():
    leases, clock = book()
    ref = leases.grant("r")
    clock.now = LEASE_S - 1
    assert leases.renew("inc", [ref.generation]) == (LeaseState.HELD,)
    clock.now = 2 * LEASE_S - 2
    assert leases.confirm(ref) is LeaseState.HELD
    clock.now = 2 * LEASE_S - 1
    assert leases.confirm(ref) is LeaseState.EXPIRED
    assert leases.take_ended() == ["r"]


def test_nobody_renews_for_ever():
    leases, clock = book()
    ref = leases.grant("r")
    while clock.now < MAX_LEASE_S:
        assert leases.renew("inc", [ref.generation]) == (LeaseState.HELD,)
        clock.now += LEASE_S / 2
    assert leases.renew("inc", [ref.generation]) == (LeaseState.EXPIRED,)
    assert clock.now < MAX_LEASE_S + LEASE_S


def test_a_lease_longer_than_the_longest_is_cut():
    clock = Clock()
    leases = LeaseBook("inc", LEASE_S, LEASE_S / 2, clock)
    ref = leases.grant("r")
    clock.now = LEASE_S / 2
    assert leases.confirm(ref) is LeaseState.EXPIRED


def test_a_renewal_after_the_end_tells_the_end_and_changes_nothing():
    leases, clock = book()
    released, expired = leases.grant("a"), leases.grant("b")
    leases.release(released)
    clock.now = LEASE_S - 1
    assert leases.renew("inc", [released.generation]) == (LeaseState.RELEASED,)
    clock.now = LEASE_S
    assert leases.renew("inc", [expired.generation]) == (LeaseState.EXPIRED,)
    clock.now = LEASE_S + 1
    assert leases.confirm(expired) is LeaseState.EXPIRED
    assert sorted(leases.take_ended()) == ["a", "b"]


def test_several_leases_are_renewed_at_once_and_answered_in_order():
    leases, _ = book()
    first, second = leases.grant("a"), leases.grant("b")
    leases.release(first)
    asked = [second.generation, 99, first.generation]
    states = (LeaseState.HELD, LeaseState.UNKNOWN, LeaseState.RELEASED)
    assert leases.renew("inc", asked) == states
    assert leases.renew("other", asked) == (LeaseState.UNKNOWN,) * 3
    assert leases.take_counts() == {"granted": 2, "released": 1, "renewed": 1}


def test_a_reused_request_id_is_another_lease():
    leases, _ = book()
    old = leases.grant("r")
    leases.release(old)
    new = leases.grant("r")
    assert leases.release(old) is LeaseState.RELEASED
    assert leases.confirm(new) is LeaseState.HELD


def test_a_lease_of_another_start_or_request_is_unknown():
    leases, _ = book()
    ref = leases.grant("r")
    for stranger in (
        LeaseRef(incarnation="other", request_id="r", generation=ref.generation),
        LeaseRef(incarnation="inc", request_id="s", generation=ref.generation),
        LeaseRef(incarnation="inc", request_id="r", generation=ref.generation + 1),
    ):
        assert leases.release(stranger) is LeaseState.UNKNOWN
    assert leases.confirm(ref) is LeaseState.HELD


def test_ends_are_forgotten_after_a_while():
    leases, clock = book()
    ref = leases.grant("r")
    leases.release(ref)
    clock.now = LEASE_S + 1
    assert leases.confirm(ref) is LeaseState.UNKNOWN
    assert leases.take_counts() == {"granted": 1, "released": 1}


class LeaseMachine(RuleBasedStateMachine):
    """Whatever the order: every request is freed exactly once, and never while its lease holds.

    A lease ends by its release, or at the time that its last renewal and the longest length give.
    """

    def __init__(self):
        super().__init__()
        self.book, self.clock = book()
        self.granted = {}
        self.granted_at = {}
        self.renewed_at = {}
        self.released = set()
        self.freed = []

    @rule(name=st.sampled_from("abc"))
    def grant(self, name):
        request_id = f"{name}{len(self.granted)}"
        self.granted[request_id] = self.book.grant(request_id)
        self.granted_at[request_id] = self.renewed_at[request_id] = self.clock.now

    @rule(data=st.data(), confirm=st.booleans())
    def ask(self, data, confirm):
        if not self.granted:
            return
        ref = self.granted[data.draw(st.sampled_from(sorted(self.granted)))]
        state = self.book.confirm(ref) if confirm else self.book.release(ref)
        if confirm and state is LeaseState.HELD:
            assert ref.request_id not in self.freed
        if not confirm:
            assert state is not LeaseState.HELD
            self.released.add(ref.request_id)

    @rule(data=st.data())
    def renew(self, data):
        if not self.granted:
            return
        refs = data.draw(st.lists(st.sampled_from(sorted(self.granted)), max_size=3))
        generations = [self.granted[name].generation for name in refs]
        for name, state in zip(refs, self.book.renew("inc", generations), strict=True):
            if state is LeaseState.HELD:
                assert name not in self.freed
                self.renewed_at[name] = self.clock.now

    @invariant()
    def a_lease_holds_for_its_length_after_a_renewal_but_not_beyond_the_longest(self):
        for name, at in self.renewed_at.items():
            within = self.clock.now < min(at + LEASE_S, self.granted_at[name] + MAX_LEASE_S)
            released = name in self.released
            if within and not released:
                assert self.book.confirm(self.granted[name]) is LeaseState.HELD
            elif not released:
                assert self.book.confirm(self.granted[name]) is not LeaseState.HELD

    @rule(seconds=st.floats(0, LEASE_S))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def free(self):
        self.freed += self.book.take_ended()

    @invariant()
    def nothing_is_freed_twice(self):
        assert len(self.freed) == len(set(self.freed))

    def teardown(self):
        self.clock.now += MAX_LEASE_S
        self.freed += self.book.take_ended()
        assert sorted(self.freed) == sorted(self.granted)
        assert self.book.live() == 0


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, deadline=None)
