"""Faults against the KV pool: whatever happens, no wrong byte, no lost block, no hang.

Each request's cache is compared with what its tokens give in every step that it runs in, on every
rank, and its tokens with the model's; every free block of every engine must be back at the end.
"""

import pytest
from chaos_model import BLOCK_TOKENS
from chaos_pool import CALL_FAULTS, MODES, PATIENT, PATIENT_SERVERS, whole_blocks
from chaos_pool_faults import PoolFaults, storm, storm_settings
from chaos_store import BAD_GETS, BAD_LOOKUPS, BAD_OBJECTS, BAD_PUTS, CALLS, SLOW_CALLS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(170)]

FAULTS_IN_A_DEFAULT_RUN = 100
RUN = set()


@pytest.fixture(autouse=True)
def note_the_test(request):
    RUN.add(request.node.originalname)


def send_until(cluster, enough, **more):
    """Requests until chance has had its turns; ``enough`` looks at the injected faults."""
    cluster.send(40, **more)
    while not enough(cluster.injected):
        cluster.send(10, **more)


def failures(sums):
    """Counters of what did not get into or out of the pool."""
    return {name: n for name, n in sums.items() if name.startswith("pool_failures")}


@pytest.mark.parametrize("mode", MODES)
def test_without_faults_one_engine_loads_all_that_the_other_one_stored(run_pool, mode):
    with run_pool(settings=MODES[mode] | PATIENT, **PATIENT_SERVERS) as cluster:
        prompts = [cluster.random_tokens(length) for length in (40, 64, 65, 150, 399)]
        cluster.one_by_one("a", prompts)
        cluster.one_by_one("b", prompts)
        stored, loaded = cluster.sums("a"), cluster.sums("b")
    blocks = sum(map(whole_blocks, prompts))
    assert cluster.outcomes() == {"finished": 10}
    assert stored["pool_unstored_blocks"] == 0
    assert loaded["pool_hit_tokens"] == blocks * BLOCK_TOKENS
    assert loaded["pool_load_objects"] == 2 * blocks
    assert not failures(stored)
    assert not failures(loaded)
    assert not cluster.seen["object missing"]


def test_a_block_that_lacks_one_shard_is_no_hit(run_pool):
    with run_pool(settings=PATIENT, **PATIENT_SERVERS) as cluster:
        loaded = cluster.load_with_a_shard_missing(block=5)
    assert loaded["pool_hit_tokens"] == 5 * BLOCK_TOKENS
    assert not failures(loaded)
    assert not cluster.seen["object missing"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_objects_that_are_gone_or_damaged_or_foreign(run_pool, mode):
    bad = {"store_faults": BAD_OBJECTS, "store_rates": {"get": 0.4}}
    with run_pool(settings=MODES[mode], **bad) as cluster:
        send_until(cluster, lambda injected: injected.total() > 10)
    assert cluster.outcomes().keys() == {"finished"}


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_calls_that_fail_or_come_late_on_one_rank(run_pool, mode):
    puts = {"store_faults": BAD_PUTS, "store_rates": {"put": 0.2, "put exists": 0.15}}
    gets = {"store_faults": (*BAD_GETS, *BAD_LOOKUPS), "store_rates": {"get": 0.4, "lookup": 0.1}}
    with run_pool(settings=MODES[mode], **puts, only_b=gets) as cluster:
        send_until(cluster, lambda injected: injected.total() > 10, pause_s=0.1)
    assert cluster.outcomes().keys() == {"finished"}


def test_requests_that_can_never_be_loaded_are_computed(run_pool):
    hopeless = {"store_faults": ("get: error",), "store_rates": {"get": 1.0}}
    with run_pool(settings=PATIENT, only_b=hopeless, **PATIENT_SERVERS) as cluster:
        prompts = [cluster.random_tokens(150) for _ in range(5)]
        cluster.one_by_one("a", prompts)
        cluster.one_by_one("b", prompts)
        failed = cluster.sums("b")
    assert cluster.outcomes() == {"finished": 10}
    # Each was tried once.
    assert failed["pool_hit_tokens"] == sum(map(whole_blocks, prompts)) * BLOCK_TOKENS


def test_aborts_and_preemptions_while_blocks_are_loaded_and_stored(run_pool):
    slow = {"store_faults": SLOW_CALLS, "store_rates": dict.fromkeys(CALLS, 0.6)}
    with run_pool(num_blocks=80, **slow) as cluster:
        while not {"abort while loading", "abort while blocks are held"} <= cluster.injected.keys():
            cluster.send(20, ("", "", *CALL_FAULTS), max_tokens=80, pause_s=0.03)
            cluster.settle(60)
    assert cluster.outcomes().keys() <= {"finished", "aborted"}

    # A request that fills the cache makes way for those before it, long before it is stored.
    slow["store_rates"], slow["store_slow_s"] = {"put exists": 1.0}, (1.0, 1.5)
    with run_pool(num_blocks=40, settings=PATIENT, **slow) as cluster:
        for length in (40, 40, 32 * BLOCK_TOKENS):
            cluster.submit(node="a", prompt=cluster.random_tokens(length), max_tokens=60)
        cluster.settle(60)
        assert "preempted while storing" in cluster.injected
    assert cluster.outcomes() == {"finished": 3}


def test_serving_goes_on_while_there_is_no_master(run_pool):
    with run_pool() as cluster:
        cluster.send(5)
        for hang in (True, False):
            cluster.hurt_master(hang=hang)
            cluster.injected["no master for a while"] += 1
            cluster.send(10)
            # All of them end before the master is back.
            cluster.settle(60)
            cluster.mend_master()
        cluster.send(5)
    assert cluster.outcomes() == {"finished": 30}


def test_clients_that_lend_memory_are_killed(run_pool):
    with (
        run_pool() as cluster,
        PoolFaults(cluster, ("kill lender", "kill rank", "kill engine"), rate=0.15),
    ):
        send_until(cluster, lambda injected: injected.total() > 2, pause_s=0.1)
    assert cluster.outcomes().keys() <= {"finished", "lost"}


def test_resets_during_traffic(run_pool):
    with (
        run_pool(only_b={"prefix_caching": True}) as cluster,
        PoolFaults(cluster, ("reset", "reset and preempt"), rate=0.5),
    ):
        send_until(cluster, lambda injected: injected["reset"] > 1)
    assert cluster.outcomes().keys() == {"finished"}


def test_a_pool_that_is_too_small(run_pool):
    # Room for 75 blocks; the requests have several hundred.
    tiny = {"settings": {"global_segment_size": 0}, "segment_bytes": 16 << 20}
    with run_pool(**tiny, flags={"default_kv_lease_ttl": 200}) as cluster:
        cluster.send(60, pause_s=0.08)
        cluster.settle(60)
        sums = cluster.sums("a") + cluster.sums("b")
    assert cluster.outcomes() == {"finished": 60}
    assert sums["pool_failures/full"] or cluster.seen["object missing"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_everything_at_once(run_pool, mode):
    with run_pool(**storm_settings(MODES[mode])) as cluster:
        storm(cluster)


def test_a_default_run_injects_enough_faults(injected_into_pools):
    here = {n for n in globals() if n.startswith("test_")}
    if here > RUN:
        pytest.skip("only a part of the suite was run")
    print(f"{injected_into_pools.total()} faults: {dict(sorted(injected_into_pools.items()))}")
    assert injected_into_pools.total() >= FAULTS_IN_A_DEFAULT_RUN
