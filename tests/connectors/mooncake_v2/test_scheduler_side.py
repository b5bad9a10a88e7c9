"""The scheduler sides of a prefill and a decode node over a real control channel; no workers."""

import time
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from builders import address, rank_manifest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config
from kvpp_connect.connectors.mooncake_v2.control import ControlClient, UnreachableError
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.metadata import parse_remote_prefill
from kvpp_connect.connectors.mooncake_v2.scheduler_side import SchedulerSide
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.layout import GroupManifest
from kvpp_connect.seam.api import RequestStatus

PROMPT = list(range(40))
LEASE_S = 0.8


def publication():
    return GroupManifest(
        num_blocks=8,
        block_tokens=16,
        ranks=(rank_manifest(0, address("layer", 0)),),
    )


def request(request_id, params, status=RequestStatus.FINISHED_LENGTH_CAPPED):
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        kv_transfer_params=params,
        status=status,
        num_computed_tokens=len(PROMPT),
    )


@pytest.fixture
def make_side(awake, monkeypatch):
    """Makes sides; leases are as long as the process is awake, since renewals sleep with it."""
    book = partial(LeaseBook, clock=awake)
    monkeypatch.setattr("kvpp_connect.connectors.mooncake_v2.producer.LeaseBook", book)
    sides = []

    def make(role, host="127.0.0.1", **settings):
        side = SchedulerSide(
            config=MooncakeV2Config(control_timeout_s=2, **settings),
            host=host,
            port=0,
            engine_id=role,
            produces=role == "p",
            consumes=role == "d",
        )
        side.publish([publication()])
        sides.append(side)
        return side

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def p(make_side):
    return make_side("p", lease_s=LEASE_S)


@pytest.fixture
def d(make_side):
    return make_side("d")


def hand_over(p, request_id="on p"):
    kept, params = p.request_finished(request(request_id, {"do_remote_decode": True}), [1, 2, 3])
    assert kept
    return params


def state_of(params, keys=None):
    """The lease's state as its producer tells it."""
    remote = parse_remote_prefill(params)
    with ControlClient(remote.host, remote.port, 2, keys) as client:
        return client.ask(wire.Confirm(remote.lease)).state


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.02)
    return value


def test_a_request_that_waits_on_d_for_long_keeps_its_blocks_and_gives_them_back_when_aborted(
    p, d, awake
):
    params = hand_over(p)
    waiting = request("on d", params, RequestStatus.WAITING)
    d.arrived(waiting)
    awake.sleep(3 * LEASE_S)
    assert state_of(params) is wire.LeaseState.HELD
    assert p.take_orders().ended_leases == frozenset()
    waiting.status = RequestStatus.FINISHED_ABORTED
    assert d.request_finished(waiting, []) == (False, None)
    assert wait_for(lambda: p.take_orders().ended_leases) == {"on p"}
    assert d.take_orders().cancelled == frozenset()


def test_an_abort_in_mid_pull_is_ordered_once_and_the_blocks_come_back_when_workers_are_done(
    p, d, awake
):
    params = hand_over(p)
    running = request("on d", params, RequestStatus.WAITING)
    d.arrived(running)
    tokens, in_background = d.matched_tokens(running, 0)
    assert (tokens, in_background) == (40, True)
    d.allocated(running, [4, 5, 6], tokens)
    assert [pull.request_id for pull in d.take_orders().pulls] == ["on d"]
    running.status = RequestStatus.FINISHED_ABORTED
    d.request_finished(running, [])
    assert d.take_orders().cancelled == {"on d"}
    assert d.take_orders().cancelled == frozenset()
    awake.sleep(2 * LEASE_S)  # workers may be slow to stop: the lease holds meanwhile
    assert state_of(params) is wire.LeaseState.HELD
    d.received(["on d"], {})
    assert wait_for(lambda: p.take_orders().ended_leases) == {"on p"}


def test_a_reader_that_never_comes_costs_one_lease(p, awake):
    hand_over(p)
    began = awake()
    assert wait_for(lambda: p.take_orders().ended_leases) == {"on p"}
    assert awake() - began < 3 * LEASE_S


def test_the_longest_lease_bounds_a_reader_that_hangs(make_side, d, awake):
    p = make_side("p", lease_s=LEASE_S, max_lease_s=2 * LEASE_S)
    began = awake()
    d.arrived(request("on d", hand_over(p), RequestStatus.WAITING))
    assert wait_for(lambda: p.take_orders().ended_leases) == {"on p"}
    assert 1.5 * LEASE_S < awake() - began < 5 * LEASE_S
    assert wait_for(d.take_counts) == {"leases_lost": 1}


def test_p_counts_leases_renewals_and_live_ones(p, d):
    assert p.take_counts() == {}
    params = hand_over(p)
    assert p.take_counts() == {"leases_granted": 1, "leases_live": 1}
    d.arrived(request("on d", params, RequestStatus.WAITING))
    assert wait_for(p.take_counts)["leases_renewed"] >= 1
    d.request_finished(request("on d", params, RequestStatus.FINISHED_ABORTED), [])
    seen = {}
    wait_for(lambda: seen.update(p.take_counts()) or "leases_live" in seen)
    assert (seen["leases_live"], seen["leases_released"]) == (0, 1)


def test_bad_messages_are_counted_by_cause(p):
    remote = parse_remote_prefill(hand_over(p))
    import zmq

    context = zmq.Context()
    raw = context.socket(zmq.REQ)
    raw.connect(f"tcp://127.0.0.1:{remote.port}")
    raw.send(b"garbage")
    assert raw.poll(60_000)
    context.destroy(linger=0)
    assert p.take_counts()["bad_control_messages/malformed"] == 1


def test_the_advertised_address_may_differ_from_the_bound_one(make_side):
    params = hand_over(make_side("p", host="127.0.0.1", bind_host="127.0.0.2"))
    assert params["remote_host"] == "127.0.0.1"
    assert state_of(params | {"remote_host": "127.0.0.2"}) is wire.LeaseState.HELD
    with pytest.raises(UnreachableError):
        state_of(params)


def test_what_is_on_loopback_stays_there(make_side):
    params = hand_over(make_side("p", host="127.0.0.1"))
    with pytest.raises(UnreachableError):
        state_of(params | {"remote_host": "127.0.0.2"})


def test_engines_on_one_host_take_ports_of_their_own(make_side):
    assert len({hand_over(make_side("p"))["remote_port"] for _ in range(4)}) == 4


def test_both_sides_use_the_secret_of_the_file(make_side, tmp_path, caplog):
    file = tmp_path / "secret"
    file.write_text("a secret of enough bytes")
    p = make_side("p", lease_s=LEASE_S, control_secret_file=str(file))
    with_secret, without = make_side("d", control_secret_file=str(file)), make_side("d")
    first, second = hand_over(p, "first"), hand_over(p, "second")
    with_secret.arrived(request("on d", first, RequestStatus.WAITING))
    without.arrived(request("on d", second, RequestStatus.WAITING))
    assert wait_for(lambda: p.take_orders().ended_leases) == {"second"}
    assert state_of(first, load_keys(str(file))) is wire.LeaseState.HELD
    assert "control_secret_file must name the same secret" in caplog.text
    with_secret.request_finished(request("on d", first, RequestStatus.FINISHED_ABORTED), [])
    assert wait_for(lambda: p.take_orders().ended_leases) == {"first"}
