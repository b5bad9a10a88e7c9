"""The pool's suite turns red when the connector is broken: each leaves one protection out."""

import pytest
from chaos_pool import PATIENT, PATIENT_SERVERS
from chaos_store import CALLS, SLOW_CALLS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(170)]


@pytest.fixture
def run_broken(run_pool):
    """Runs a pool that must show wrong bytes; answers them."""

    def run(act, **how):
        with (
            pytest.raises(AssertionError) as failure,
            run_pool(**PATIENT_SERVERS, **how) as cluster,
        ):
            act(cluster)
        assert cluster.wrong, failure.value
        return cluster.wrong

    return run


@pytest.mark.parametrize("fault", ["damaged", "of other content"])
def test_damage_is_noticed_when_seals_are_not_checked(run_broken, fault):
    def act(cluster):
        prompts = [cluster.random_tokens(300) for _ in range(4)]
        cluster.one_by_one("a", prompts)
        cluster.one_by_one("b", prompts)

    bad = {"store_faults": (f"get: object {fault}",), "store_rates": {"get": 1.0}}
    wrong = run_broken(act, settings=PATIENT | {"verify": False}, only_b=bad)
    assert "cached tokens are wrong" in wrong[0]


def test_a_hit_with_one_shard_missing_is_noticed(run_pool):
    careless = {"sabotage": "one_shard_will_do"}
    with run_pool(settings=PATIENT, only_b=careless, **PATIENT_SERVERS) as cluster:
        loaded = cluster.load_with_a_shard_missing(block=5)
    # The bytes are right all the same: the load notices as well.
    assert cluster.seen["object missing"]
    assert loaded["pool_failures/missing"]


def test_blocks_that_are_let_go_while_they_are_stored_are_noticed(run_broken):
    def act(cluster):
        prompts = [cluster.random_tokens(300) for _ in range(6)]
        cluster.one_by_one("a", prompts)
        cluster.one_by_one("b", prompts)

    slow = {"store_faults": SLOW_CALLS, "store_rates": dict.fromkeys(CALLS, 1.0)}
    run_broken(act, settings=PATIENT, sabotage="no_pins", **slow)


def test_storing_what_was_computed_from_garbage_is_noticed(run_broken):
    def act(cluster):
        known = [cluster.random_tokens(200) for _ in range(4)]
        cluster.one_by_one("a", known)
        longer = [[*prompt, *cluster.random_tokens(100)] for prompt in known]
        cluster.one_by_one("b", longer)
        cluster.one_by_one("a", longer)  # brings back what was gone
        cluster.one_by_one("a", longer)

    how = PATIENT | {"load_async": False}
    gone = {
        "store_faults": ("get: object gone",),
        "store_rates": {"get": 1.0},
        "sabotage": "puts_at_once",
    }
    run_broken(act, settings=how, only_b=gone | {"sabotage": "puts_at_once"})
