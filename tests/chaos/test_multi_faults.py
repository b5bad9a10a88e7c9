"""P/D and a pool in one engine, inside vLLM's MultiConnector, with all that hurts either of them.

Judged as everywhere here: each byte in each step, each token, each block at the end.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from chaos_faults import CALL_FAULTS, NodeFaults, storm
from chaos_pool import MASTER_FLAGS, PATIENT, PATIENT_SERVERS, Lender
from chaos_spec import POOL_SETTINGS
from chaos_store import STORE_FAULTS
from pool_equipment import mooncake_master

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(170)]


@contextmanager
def run_pool(flags):
    """Settings of a pool whose memory outlives the engines, and is enough for all requests."""
    with mooncake_master(**flags) as master:
        lender = Lender(master.address, 256 << 20)
        yield {
            **POOL_SETTINGS,
            "master_server_address": master.address,
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": "1MB",
        }
        lender.kill()


@pytest.fixture
def nodes(prefill_spec, decode_spec):
    """Describes a prefill node and two decode nodes; the first shares the prefill node's cut."""

    def describe(*, pool_first, pool_settings=None, flags=MASTER_FLAGS, **changes):
        pool = pools.enter_context(run_pool(flags))
        both = {"pool": {**pool, **(pool_settings or {})}, "pool_first": pool_first, **changes}
        prefill = prefill_spec(**both)
        return prefill, [decode_spec("d1", ranks=2, kvpp=True, **both), decode_spec("d2", **both)]

    with ExitStack() as pools:
        yield describe


ORDERS = pytest.mark.parametrize("pool_first", [False, True], ids=["pool second", "pool first"])


@ORDERS
def test_without_faults_everything_is_pulled_and_prefixes_come_from_the_pool(
    run_cluster, nodes, pool_first
):
    prefill, decodes = nodes(pool_first=pool_first, pool_settings=PATIENT, **PATIENT_SERVERS)
    prefill = replace(prefill, settings=prefill.settings | {"lease_s": 60})
    decodes = [replace(d, settings=d.settings | {"control_timeout_s": 30}) for d in decodes]
    with run_cluster(prefill, decodes) as cluster:
        prompts = [cluster.make_prompt() for _ in range(8)]
        for prompt in (*prompts, *prompts):
            cluster.submit(prompt=prompt)
            cluster.settle(60)
        sums = {name: cluster.sums(name) for name in cluster.nodes}
    assert cluster.outcomes() == {"finished": 16}
    assert sums["p"]["pool_hit_tokens"] >= sum(16 * ((len(p) - 1) // 16) for p in prompts)
    assert sums["p"]["leases_expired"] == 0
    for name in ("d1", "d2"):
        assert sums[name]["pull_tokens"] > 0
        assert sums[name]["pool_stored_blocks"] > 0
        assert sums[name]["pool_hit_tokens"] == 0
    assert not any(n for total in sums.values() for k, n in total.items() if "failures" in k)


@ORDERS
def test_where_a_prefill_node_dies_the_pool_helps_the_decode_node(run_cluster, nodes, pool_first):
    prefill, (same_cut, _) = nodes(pool_first=pool_first, pool_settings=PATIENT)
    hit = 0
    with (
        run_cluster(prefill, [same_cut]) as cluster,
        NodeFaults(cluster, ("kill prefill rank",), rate=0.4),
    ):
        while cluster.injected["node kill prefill rank"] < 4 or not hit:
            for _ in range(4):
                cluster.submit()
                cluster.pump(cluster.rng.uniform(0, 0.3))
            cluster.settle(60)
            hit += cluster.sums("d1")["pool_hit_tokens"]
    assert not cluster.outcomes().keys() & {"failed", "rejected"}


@ORDERS
def test_requests_that_are_aborted_everywhere(run_cluster, nodes, pool_first):
    slow = {"store_faults": ("put: slow", "get: slow"), "store_rates": {"put": 0.5, "get": 0.5}}
    with run_cluster(*nodes(pool_first=pool_first, **slow)) as cluster:
        for number in range(6 * len(CALL_FAULTS)):
            cluster.submit(fault=CALL_FAULTS[number % len(CALL_FAULTS)])
            cluster.pump(cluster.rng.uniform(0, 0.1))
    assert not cluster.outcomes().keys() & {"failed", "lost"}


@ORDERS
def test_everything_at_once_to_both(run_cluster, nodes, pool_first):
    bad = {
        "store_faults": STORE_FAULTS,
        "store_rates": {"get": 0.2, "put": 0.08, "put exists": 0.05, "lookup": 0.03},
    }
    with run_cluster(*nodes(pool_first=pool_first, **bad), settle_s=80) as cluster:
        storm(cluster)
