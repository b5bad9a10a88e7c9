"""`make soak`: everything at once on a pool, on fresh seeds, until the time is over."""

import random
import time

import pytest
from chaos_pool import MODES
from chaos_pool_faults import storm, storm_settings

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0)]


def test_soak(request, seed, run_pool):
    """Every round prints its seed; ``--chaos-seed`` with ``--chaos-soak-s 1`` repeats the round."""
    limit_s = request.config.getoption("--chaos-soak-s")
    if not limit_s:
        pytest.skip("takes its time: make soak")
    deadline = time.monotonic() + limit_s
    while True:
        print(f"\nchaos seed: {seed}")
        rng = random.Random(seed)
        mode, kvpp = rng.choice(list(MODES)), rng.random() < 0.7
        with run_pool(**storm_settings(MODES[mode]), kvpp=kvpp, seed=seed) as cluster:
            storm(cluster)
        if time.monotonic() > deadline:
            break
        seed = random.randrange(10**6)
