"""Ranks of a decode node that read each layer once from the prefill node, and share it."""

import pytest
from pull_nodes import LAYERS, P_BLOCKS, PROMPT, DecodeGroup

from kvpp_connect.errors import PeerError

pytestmark = pytest.mark.distributed

LOGICAL_BYTES = len(PROMPT) * 576 * 4 * len(LAYERS)


@pytest.fixture
def groups():
    """Makes decode groups that are closed after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(DecodeGroup(*args, **kwargs))
        return made[-1]

    yield make
    for group in made:
        group.close()


def sums(group):
    found = [stats.take() for stats in group.stats]
    return {name: [row.get(name, 0) for row in found] for name in ("pull_bytes", "pull_peer_bytes")}


@pytest.mark.parametrize("size", [2, 3])
def test_each_byte_leaves_the_prefill_node_once(make_producer, groups, size):
    group = groups([range(4)] * size)
    assert group.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    group.assert_pulled()
    found = sums(group)
    assert sum(found["pull_bytes"]) == LOGICAL_BYTES
    assert sum(found["pull_peer_bytes"]) == LOGICAL_BYTES * (size - 1)
    assert all(found["pull_bytes"])


def test_in_direct_mode_every_rank_reads_all(make_producer, groups):
    group = groups([range(4)] * 2, mode="direct")
    assert group.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    group.assert_pulled()
    assert sums(group) == {"pull_bytes": [LOGICAL_BYTES] * 2, "pull_peer_bytes": [0, 0]}


def test_a_decode_node_with_kvpp_reads_only_what_each_rank_owns(make_producer, groups):
    group = groups([[0, 1, 2], [3]])
    assert group.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS), first_token=16)
    group.assert_pulled(first_token=16)
    assert sums(group)["pull_peer_bytes"] == [0, 0]


class Broken:
    """A transfer engine that cannot read what it should."""

    def __init__(self, engine, sessions):
        self.engine = engine
        self.sessions = sessions

    @property
    def session(self):
        return self.engine.session

    def register(self, address, length_bytes):
        self.engine.register(address, length_bytes)

    def read(self, session, *lists):
        if session in self.sessions:
            raise PeerError("no route")
        self.engine.read(session, *lists)


def test_a_share_that_cannot_be_read_fails_the_pull_on_every_rank(make_producer, groups, ranks):
    made = []

    def first_is_broken(engine):
        made.append(engine)
        sessions = {rank.session for rank in ranks[1]} if len(made) == 1 else set()
        return Broken(engine, sessions)

    group = groups([range(4)] * 3, wrap=first_is_broken)
    group.submit(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    assert [result.succeeded for result in group.results()] == [False] * 3


def test_a_cancelled_pull_ends_on_every_rank_and_the_next_one_works(make_producer, groups):
    group = groups([range(4)] * 2)
    producer = make_producer()
    # Rank 1 never hears of the request, so rank 0 waits for its share.
    request_id = group.submit(producer.hand_over("r", PROMPT, P_BLOCKS), ranks=[0])
    with pytest.raises(TimeoutError):
        group.results(ranks=[0], timeout_s=1)
    group.pullers[0].cancel(frozenset({request_id, "never heard of"}))
    (result,) = group.results(ranks=[0])
    assert not result.succeeded
    assert group.pullers[0].running() == 0
    assert group.pull(producer.hand_over("r", PROMPT, P_BLOCKS))
    group.assert_pulled()


def test_many_pulls_at_once_all_arrive(make_producer, groups):
    group = groups([range(4)] * 2)
    producer = make_producer()
    sent = {group.submit(producer.hand_over(f"r{n}", PROMPT, P_BLOCKS)) for n in range(12)}
    for results in group.many_results(len(sent)):
        assert all(result.succeeded for result in results)
        assert {result.request_id for result in results} == sent
    group.assert_pulled()
