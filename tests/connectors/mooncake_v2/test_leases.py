from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef, LeaseState

LEASE_S = 10.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


def book():
    clock = Clock()
    return LeaseBook("inc", LEASE_S, clock), clock


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
    """Whatever the order: every request is freed exactly once, and never while its lease holds."""

    def __init__(self):
        super().__init__()
        self.book, self.clock = book()
        self.granted = {}
        self.freed = []

    @rule(name=st.sampled_from("abc"))
    def grant(self, name):
        request_id = f"{name}{len(self.granted)}"
        self.granted[request_id] = self.book.grant(request_id)

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
        self.clock.now += LEASE_S
        self.freed += self.book.take_ended()
        assert sorted(self.freed) == sorted(self.granted)
        assert self.book.live() == 0


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, deadline=None)
