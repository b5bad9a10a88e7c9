"""Ranks as objects of one process: who may run ahead of whom, and by how much."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from kvpp_connect.broadcast.meeting import NotOneMachineError
from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.broadcast.shared_memory import (
    CHUNK_BYTES,
    CHUNKS,
    SharedMemoryBroadcast,
)
from kvpp_connect.errors import PeerError


class Gathering:
    """A gather between threads."""

    def __init__(self, size):
        self.rows = [b""] * size
        self.barrier = Barrier(size)

    def of(self, rank):
        def gather(value):
            self.rows[rank] = value
            self.barrier.wait(60)
            rows = list(self.rows)
            self.barrier.wait(60)
            return rows

        return gather


@pytest.fixture
def connect():
    """Connects some ranks with each other."""
    made = []

    def connect_all(size, limit_s=60.0):
        gathering = Gathering(size)
        with ThreadPoolExecutor(size) as pool:
            made.extend(
                pool.map(
                    lambda rank: SharedMemoryBroadcast.connect(rank, gathering.of(rank), limit_s),
                    range(size),
                )
            )
        return made[-size:]

    yield connect_all
    for transport in made:
        transport.close()


def payload(number, size=CHUNK_BYTES):
    return torch.full((size,), number, dtype=torch.uint8)


def receive(transport, owner, size=CHUNK_BYTES):
    data = torch.full((size,), 255, dtype=torch.uint8)
    transport.start(data, owner).wait()
    return data


def test_an_owner_runs_ahead_by_a_ring_without_waiting_for_anybody(connect):
    owner, peer = connect(2)
    for number in range(CHUNKS):
        data = payload(number)
        owner.start(data, 0).wait()
        data.fill_(99)  # it is the owner's again
    for number in range(CHUNKS):
        assert torch.equal(receive(peer, 0), payload(number))


def test_a_chunk_is_not_filled_again_before_the_slowest_peer_has_read_it(connect):
    owner, quick, slow = connect(3, limit_s=0.3)
    for number in range(CHUNKS):
        owner.start(payload(number), 0).wait()
        receive(quick, 0)
    more = owner.start(payload(50), 0)
    with pytest.raises(PeerError, match=r"^rank 2 of the KVPP group has been silent for 0\.3 s$"):
        more.wait()
    for number in range(CHUNKS):
        assert torch.equal(receive(slow, 0), payload(number))
    for rank in (quick, slow):
        with pytest.raises(PeerError, match=r"^rank 2 of the KVPP group has been silent"):
            receive(rank, 0)


@pytest.mark.parametrize("read", range(1, CHUNKS + 1))
def test_room_comes_back_when_it_has_been_read_and_not_before(connect, read):
    owner, peer = connect(2, limit_s=0.1)
    for number in range(CHUNKS):
        owner.start(payload(number), 0).wait()
    for _ in range(read):
        receive(peer, 0)
    sent = CHUNKS

    def send_on():
        nonlocal sent
        while True:
            owner.start(payload(sent), 0).wait()
            sent += 1

    with pytest.raises(PeerError, match="rank 1 of the KVPP group has been silent"):
        send_on()
    assert sent == CHUNKS + read
    for number in range(read, sent):
        assert torch.equal(receive(peer, 0), payload(number))


def test_a_payload_larger_than_the_ring_starts_to_travel_at_once(connect):
    owner, peer = connect(2)
    size = (3 * CHUNKS + 1) * CHUNK_BYTES + 5
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    pending = owner.start(data, 0)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, peer, 0, size)
        pending.wait()
        assert torch.equal(received.result(60), data)


def test_a_broadcast_that_nobody_has_waited_for_is_completed_by_the_next_one(connect):
    one, other = connect(2)
    data = torch.zeros(10, dtype=torch.uint8)
    one.start(payload(1, 10), 0)
    other.start(data, 0)
    other.start(payload(2, 10), 1)
    assert torch.equal(data, payload(1, 10))
    assert torch.equal(receive(one, 1, 10), payload(2, 10))


@pytest.mark.parametrize("page_bytes", [(36_864,), (36_864, 132), (1000, CHUNK_BYTES)])
@pytest.mark.parametrize("active", [1, 40, 300])
def test_pages_are_gathered_in_the_ring_and_arrive_as_one_range(connect, page_bytes, active):
    owner, peer = connect(2)
    caches, ids = make_caches(page_bytes, 320), torch.arange(320)[-active:]
    expected = torch.cat([cache[ids].flatten() for cache in caches])
    data = torch.full_like(expected, 99)
    pending = owner.start(data, 0, PageGather(caches, ids))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, peer, 0, len(expected))
        pending.wait()
        assert torch.equal(received.result(60), expected)
    assert data.unique().tolist() == [99], "the owner does without the slot"


def test_pages_larger_than_a_chunk_are_gathered_where_the_bytes_belong(connect):
    owner, peer = connect(2)
    caches, ids = make_caches((4, CHUNK_BYTES + 4), 6), torch.tensor([1, 4])
    expected = torch.cat([cache[ids].flatten() for cache in caches])
    data = torch.full_like(expected, 99)
    owner.start(data, 0, PageGather(caches, ids)).wait()
    assert torch.equal(receive(peer, 0, len(expected)), expected)
    assert torch.equal(data, expected)


def make_caches(page_bytes, blocks):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 90, (blocks, size), dtype=torch.uint8, generator=generator)
        for size in page_bytes
    ]


def test_waiting_again_does_nothing(connect):
    owner, peer = connect(2)
    first = owner.start(payload(1, 10), 0)
    first.wait()
    owner.start(payload(2, 10), 0).wait()
    first.wait()
    assert torch.equal(receive(peer, 0, 10), payload(1, 10))
    assert torch.equal(receive(peer, 0, 10), payload(2, 10))


def test_what_a_rank_sent_before_it_left_can_be_read_and_then_it_is_gone(connect):
    owner, peer = connect(2)
    for number in range(3):
        owner.start(payload(number), 0).wait()
    owner.close()
    for number in range(3):
        assert torch.equal(receive(peer, 0), payload(number))
    for _ in range(2):
        with pytest.raises(PeerError, match=r"^rank 0 of the KVPP group is gone$"):
            receive(peer, 0)


def test_the_first_rank_that_fails_is_named_by_all(connect):
    ranks = connect(4)
    ranks[3].close()
    for number in range(CHUNKS):
        ranks[0].start(payload(number), 0).wait()
        for rank in (1, 2):
            assert torch.equal(receive(ranks[rank], 0), payload(number))
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
        ranks[0].start(payload(1), 0).wait()
    for rank in (1, 2):
        with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
            receive(ranks[rank], 0)
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
        ranks[0].start(payload(1), 0)


def test_ranks_that_disagree_about_the_size_are_out_of_step(connect):
    owner, peer = connect(2)
    owner.start(payload(1, 100), 0).wait()
    with pytest.raises(
        PeerError,
        match=r"^rank 0 of the KVPP group is out of step: it sends broadcast 1 of 100 bytes, "
        r"expected broadcast 1 of 101 bytes$",
    ):
        receive(peer, 0, 101)
    with pytest.raises(PeerError, match=r"rank 0 of the KVPP group is out of step"):
        receive(owner, 1)


def test_ranks_that_both_send_are_out_of_step(connect):
    one, other = connect(2)
    one.start(payload(1, 100), 0).wait()
    other.start(payload(1, 100), 1).wait()
    one.start(payload(2, 100), 0).wait()
    with pytest.raises(PeerError, match="it sends broadcast 1 of 100 bytes, expected broadcast 2"):
        receive(other, 0, 100)


def test_an_error_while_meeting_is_one_for_all(connect, monkeypatch):
    def refuse(*_):
        raise OSError("no descriptors left")

    monkeypatch.setattr("socket.send_fds", refuse)
    monkeypatch.setattr("kvpp_connect.broadcast.meeting._MEETING_LIMIT_S", 0.5)
    with pytest.raises(NotOneMachineError, match="rank 1 does not reach the others: no descr"):
        connect(3)
