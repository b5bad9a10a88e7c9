"""Faults against the connector: whatever happens, no wrong byte, no lost block, no hang.

Each request's cache is compared with what its tokens give in every step that it runs in, and its
tokens with the model's; every free block of every node must be back at the end.
"""

import itertools

import pytest
from chaos_faults import CALL_FAULTS, NodeFaults, storm
from chaos_proxy import FAULTS
from chaos_spec import LATE_WRITE_S

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(170)]

FAULTS_IN_A_DEFAULT_RUN = 200
RUN = set()


@pytest.fixture(autouse=True)
def note_the_test(request):
    RUN.add(request.node.originalname)


def send(cluster, count, faults=("",), pause_s=0.03, **more):
    """Requests, one after the other, with faults in turn."""
    for _, fault in zip(range(count), itertools.cycle(faults), strict=False):
        cluster.submit(fault=fault, **more)
        cluster.pump(cluster.rng.uniform(0, 2 * pause_s))


def test_without_faults_every_request_is_pulled_and_right(run_cluster, prefill_spec, decode_spec):
    nodes = decode_spec("d1"), decode_spec("d2", ranks=2)
    with run_cluster(prefill_spec(), nodes) as cluster:
        send(cluster, 30)
    assert cluster.outcomes() == {"finished": 30}


def test_a_bad_control_channel(run_cluster, prefill_spec, decode_spec):
    nodes = decode_spec("d1"), decode_spec("d2", ranks=2)
    with run_cluster(prefill_spec(), nodes) as cluster:
        cluster.proxy.rate = 0.35
        while not all(cluster.proxy.injected[f"control {fault}"] for fault in FAULTS):
            send(cluster, 50)
            cluster.settle(60)
        cluster.proxy.rate = 0
    assert cluster.outcomes().keys() == {"finished"}


def test_clients_and_routers_that_misbehave(run_cluster, prefill_spec, decode_spec):
    nodes = decode_spec("d1"), decode_spec("d2", ranks=2)
    with run_cluster(prefill_spec(), nodes) as cluster:
        send(cluster, 6 * len(CALL_FAULTS), CALL_FAULTS)
    assert not cluster.outcomes().keys() & {"failed", "lost"}
    assert all(cluster.injected[f"request {fault}"] == 6 for fault in CALL_FAULTS)


def test_request_ids_that_come_again(run_cluster, prefill_spec, decode_spec):
    with run_cluster(prefill_spec(), [decode_spec()]) as cluster:
        number = 0
        while number < 48 or cluster.outcomes()["finished"] <= 12:
            fault = cluster.rng.choice(("", "", "", "abort_pull", "abort_decode", "twice"))
            cluster.submit(request_id=f"again{number % 4}", fault=fault)
            cluster.injected["request id again"] += number >= 4
            cluster.pump(cluster.rng.uniform(0, 0.2))
            number += 1
    # Where the id is still in use, the engine says so.
    assert cluster.outcomes().keys() <= {"finished", "aborted", "rejected"}


def test_a_bad_data_path(run_cluster, prefill_spec, decode_spec):
    kinds = ("stall short", "stall long", "stall endless", "cut source", "cut reader")
    nodes = decode_spec("d1"), decode_spec("d2", ranks=2)
    with (
        # An endless stall may come with every call, one after the other.
        run_cluster(prefill_spec(), nodes, settle_s=100) as cluster,
        NodeFaults(cluster, (*kinds, "stall decode rank"), rate=0.8),
    ):
        send(cluster, 40, pause_s=0.3)
    assert cluster.outcomes() == {"finished": 40}


def test_reads_that_fail_and_write_later(run_cluster, prefill_spec, decode_spec):
    nodes = decode_spec("d1", late_reads=0.4), decode_spec("d2", ranks=2, late_reads=0.3)
    with run_cluster(prefill_spec(), nodes) as cluster:
        while cluster.injected["read fails and writes late"] <= 10:
            send(cluster, 40, ("", "", "abort_pull", "abort_decode"), pause_s=0.15)
            cluster.pump(LATE_WRITE_S)
    assert cluster.outcomes().keys() <= {"finished", "aborted"}


def test_leases_that_end_during_a_read(run_cluster, prefill_spec, decode_spec):
    kinds = "stall until the lease is over", "stall prefill scheduler"
    with (
        run_cluster(prefill_spec(), [decode_spec("d1"), decode_spec("d2")]) as cluster,
        NodeFaults(cluster, kinds, rate=0.7),
    ):
        send(cluster, 24, pause_s=0.4)
    assert cluster.outcomes() == {"finished": 24}


@pytest.mark.parametrize("victim", ["prefill", "prefill rank", "decode", "decode rank"])
def test_a_node_is_killed_in_mid_transfer(run_cluster, prefill_spec, decode_spec, victim):
    nodes = decode_spec("d1"), decode_spec("d2", ranks=2)
    with (
        run_cluster(prefill_spec(), nodes) as cluster,
        NodeFaults(cluster, (f"kill {victim}",), rate=0.25),
    ):
        while cluster.injected[f"node kill {victim}"] < 5:
            send(cluster, 4, pause_s=0.1)
    assert cluster.restarts >= 5
    assert not cluster.outcomes().keys() & {"failed", "rejected"}


def test_policy_fail_ends_requests_cleanly(run_cluster, prefill_spec, decode_spec):
    with run_cluster(prefill_spec(), [decode_spec(policy="fail")]) as cluster:
        send(cluster, 16, ("damaged", ""))
    assert cluster.outcomes().keys() == {"finished", "failed"}


@pytest.mark.parametrize("kvpp", ["on prefill", "on decode", "on both"])
def test_everything_at_once(run_cluster, prefill_spec, decode_spec, kvpp):
    prefill = prefill_spec(kvpp=kvpp != "on decode")
    nodes = decode_spec("d1", ranks=2, kvpp=kvpp != "on prefill"), decode_spec("d2")
    with run_cluster(prefill, nodes) as cluster:
        storm(cluster)


def test_a_default_run_injects_enough_faults(injected, request):
    here = {n for n in globals() if n.startswith("test_")}
    if here > RUN:
        pytest.skip("only a part of the suite was run")
    print(f"{sum(injected.values())} faults: {dict(sorted(injected.items()))}")
    assert sum(injected.values()) >= FAULTS_IN_A_DEFAULT_RUN
