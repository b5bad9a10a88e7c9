"""Clusters of real processes; vLLM, Mooncake and ZeroMQ are real, the model runner is ours."""

import random
from collections import Counter
from contextlib import contextmanager

import pytest
from chaos_spec import DECODE_SETTINGS, POOL_SETTINGS, PREFILL_SETTINGS, NodeSpec

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("mooncake", reason="needs mooncake")

from kvpp_connect.demo.model import write_checkpoint
from kvpp_connect.demo.ports import free_ports

INJECTED = pytest.StashKey[Counter]()
INJECTED_INTO_POOLS = pytest.StashKey[Counter]()


@pytest.fixture(scope="session")
def seed(request):
    """Of all that is done; ``--chaos-seed`` repeats a run's plan, though not its timing."""
    return request.config.getoption("--chaos-seed")


@pytest.fixture
def rng(seed, request):
    """A stream of its own for each test."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def injected(request):
    """All faults of the session, by kind."""
    return request.config.stash.setdefault(INJECTED, Counter())


@pytest.fixture(scope="session")
def injected_into_pools(request):
    """The same for the pool."""
    return request.config.stash.setdefault(INJECTED_INTO_POOLS, Counter())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """What vLLM reads a model's configuration from."""
    return write_checkpoint(tmp_path_factory.mktemp("chaos") / "model")


@pytest.fixture(scope="session")
def prefill_spec(checkpoint):
    """Describes a prefill node: two ranks with KVPP."""

    def describe(**changes):
        values = {"ranks": 2, "kvpp": True, "settings": PREFILL_SETTINGS} | changes
        return NodeSpec(
            name="p",
            role="kv_producer",
            model=checkpoint,
            control_port=free_ports(1)[0],
            **values,
        )

    return describe


@pytest.fixture(scope="session")
def decode_spec(checkpoint):
    """Describes a decode node: small, so that blocks are used again soon."""

    def describe(name="d1", **changes):
        values = {"num_blocks": 112, "prefix_caching": True, "settings": DECODE_SETTINGS} | changes
        return NodeSpec(name=name, role="kv_consumer", model=checkpoint, **values)

    return describe


@pytest.fixture
def run_cluster(injected, rng):
    """Context manager: a cluster that must be whole at its end.

    Wrong bytes, lost blocks and requests that hang fail the test; faults are counted.
    """
    from chaos_cluster import Cluster

    @contextmanager
    def run(prefill, decodes, *, settle_s=40.0, seed=None):
        cluster = Cluster(prefill, decodes, rng.random() if seed is None else seed)
        try:
            yield cluster
            cluster.settle(settle_s)
        finally:
            late = cluster.close()
            injected.update(cluster.injected)
            print(f"faults: {dict(cluster.injected)}; outcomes: {dict(cluster.outcomes())}")
        assert not cluster.wrong, cluster.wrong[:10]
        assert not late, f"these did not end by themselves: {late}"

    return run


@pytest.fixture(scope="session")
def pool_spec(checkpoint):
    """Describes an engine on a pool: two ranks with KVPP."""

    def describe(name, address, **changes):
        settings = {
            "master_server_address": address,
            "protocol": "tcp",
            "global_segment_size": "64MB",
            "local_buffer_size": "1MB",
            **POOL_SETTINGS,
            **changes.pop("settings", {}),
        }
        values = {"ranks": 2, "kvpp": True, "num_blocks": 200} | changes
        return NodeSpec(
            name=name,
            role="kv_both",
            model=checkpoint,
            connector="AscendStoreConnector",
            settings=settings,
            **values,
        )

    return describe


@pytest.fixture
def run_pool(injected_into_pools, rng, pool_spec):
    """Context manager: engines ``a`` and ``b`` on one pool that must be whole at their end.

    Wrong bytes, lost blocks and requests that hang fail the test; faults are counted.
    """
    from chaos_pool import PoolCluster

    @contextmanager
    def run(*, settle_s=60.0, seed=None, flags=None, segment_bytes=64 << 20, only_b=None, **both):
        seed = rng.random() if seed is None else seed

        def describe(address):
            a = pool_spec("a", address, seed=f"{seed} a", **both)
            return [a, pool_spec("b", address, seed=f"{seed} b", **both | (only_b or {}))]

        cluster = PoolCluster(describe, seed, flags=flags, segment_bytes=segment_bytes)
        try:
            yield cluster
            cluster.settle(settle_s)
        finally:
            late = cluster.close()
            injected_into_pools.update(cluster.injected)
            print(
                f"faults: {dict(cluster.injected)}; seen: {dict(cluster.seen)}; "
                f"outcomes: {dict(cluster.outcomes())}"
            )
        assert not cluster.wrong, cluster.wrong[:10]
        assert not late, f"these did not end by themselves: {late}"

    return run
