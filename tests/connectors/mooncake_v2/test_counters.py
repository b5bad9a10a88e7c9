import pytest

from kvpp_connect.connectors.mooncake_v2.counters import FailureCause, PullStats

PULLED = {"num_bytes": 10, "peer_bytes": 4, "tokens": 3, "pieces": 2, "seconds": 0.5}


def test_pulls_add_up_and_are_told_once():
    stats = PullStats(counts_tokens=True)
    stats.pulled(**PULLED)
    stats.pulled(**PULLED)
    assert stats.take() == {
        "pulls": 2,
        "pull_bytes": 20,
        "pull_peer_bytes": 8,
        "pull_tokens": 6,
        "pull_pieces": 4,
        "pull_seconds": 1.0,
    }
    assert stats.take() == {}


def test_one_rank_counts_the_tokens():
    stats = PullStats(counts_tokens=False)
    stats.pulled(**PULLED)
    assert stats.take()["pull_tokens"] == 0


@pytest.mark.parametrize("cause", FailureCause)
def test_failures_are_told_apart(cause):
    stats = PullStats(counts_tokens=True)
    stats.failed(cause)
    assert stats.take() == {f"pull_failures/{cause.value}": 1}


def test_the_queue_is_told_while_there_is_one_and_when_it_is_empty_again():
    stats = PullStats(counts_tokens=True)
    for _ in range(3):
        stats.submitted()
    assert stats.take() == {"pulls_queued": 3}
    assert stats.take() == {"pulls_queued": 3}
    stats.failed(FailureCause.READ)
    assert stats.take()["pulls_queued"] == 2
    stats.pulled(**PULLED)
    stats.failed()
    assert stats.take()["pulls_queued"] == 0
    assert stats.take() == {}
