"""The suite turns red when the connector is broken: each control leaves one protection out."""

import pytest
from chaos_spec import DECODE_SETTINGS, LATE_WRITE_S

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(170)]


@pytest.fixture
def run_broken(run_cluster):
    """Runs a cluster that must show wrong bytes; answers them."""

    def run(prefill, decodes, act):
        with pytest.raises(AssertionError) as failure, run_cluster(prefill, decodes) as cluster:
            act(cluster)
        assert cluster.wrong, failure.value
        return cluster.wrong

    return run


def test_a_reader_that_asks_for_no_confirmation_is_noticed(run_broken, prefill_spec, decode_spec):
    def act(cluster):
        cluster.submit(fault="late")
        cluster.pump(1)

    wrong = run_broken(prefill_spec(), [decode_spec(sabotage="confirm_anything")], act)
    assert "cached tokens are wrong" in wrong[0]


def test_blocks_that_are_not_kept_after_a_failed_read_are_noticed(
    run_broken, prefill_spec, decode_spec
):
    careless = decode_spec(late_reads=0.7, settings=DECODE_SETTINGS | {"failed_read_hold_s": 0.01})

    def act(cluster):
        for _ in range(24):
            cluster.submit(fault="abort_pull")
            cluster.pump(0.1)
        cluster.pump(LATE_WRITE_S)

    run_broken(prefill_spec(), [careless], act)
