"""`make soak`: everything at once, on fresh seeds, until the time is over."""

import random
import time

import pytest
from chaos_faults import storm

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0)]

TOPOLOGIES = [  # KVPP on the prefill node, KVPP on the first decode node, ranks of that one
    (True, False, 1),
    (True, False, 2),
    (True, True, 2),
    (False, True, 2),
]


def test_soak(request, seed, run_cluster, prefill_spec, decode_spec):
    """Every round prints its seed; ``--chaos-seed`` with ``--chaos-soak-s 1`` repeats the round."""
    limit_s = request.config.getoption("--chaos-soak-s")
    if not limit_s:
        pytest.skip("takes its time: make soak")
    deadline = time.monotonic() + limit_s
    while True:
        print(f"\nchaos seed: {seed}")
        on_prefill, on_decode, ranks = random.Random(seed).choice(TOPOLOGIES)
        nodes = decode_spec("d1", ranks=ranks, kvpp=on_decode), decode_spec("d2")
        with run_cluster(prefill_spec(kvpp=on_prefill), nodes, seed=seed) as cluster:
            storm(cluster)
        if time.monotonic() > deadline:
            break
        seed = random.randrange(10**6)
