"""What every transport promises, over gloo and over shared memory, with real processes."""

import os
import signal
import socket
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from kvpp_connect.broadcast import meeting, transports
from kvpp_connect.broadcast.collective import TorchBroadcast
from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.broadcast.shared_memory import CHUNK_BYTES, CHUNKS, SharedMemoryBroadcast
from kvpp_connect.broadcast.transports import create_transport
from kvpp_connect.errors import ConfigError, PeerError
from kvpp_connect.platforms.base import select_platform

pytestmark = pytest.mark.distributed

CLASSES = {"collective": TorchBroadcast, "shared_memory": SharedMemoryBroadcast}
RING = CHUNKS * CHUNK_BYTES
SIZES = [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, RING, RING + 1, 3 * RING + 7]
GUARD = 64

every_transport = pytest.mark.parametrize("transport", list(CLASSES))


def meet(rank, world, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    torch.set_num_threads(1)


def connect(wanted, groups, timeout_s=60.0):
    """This rank's transport and its rank in its group."""
    rank = dist.get_rank()
    ranks = next(group for group in groups if rank in group)

    def gather(value):
        rows = [b""] * dist.get_world_size()
        dist.all_gather_object(rows, value)
        return [rows[member] for member in ranks]

    transport = create_transport(wanted, select_platform("cpu"), groups, gather, timeout_s)
    return transport, ranks.index(rank)


def contents(seed, size):
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def read_back(transport, rank, owner, seed, size):
    """One broadcast; says what is wrong with this rank's bytes afterwards."""
    memory = torch.full((size + 2 * GUARD,), 255, dtype=torch.uint8)
    data = memory[GUARD : GUARD + size]
    expected = contents(seed, size)
    if rank == owner:
        data.copy_(expected)
    transport.start(data, owner).wait()
    assert torch.equal(data, expected), (rank, owner, size)
    around = torch.cat([memory[:GUARD], memory[GUARD + size :]])
    assert (around == 255).all(), (rank, owner, size)


def run_all_owners_and_sizes(pipe, wanted, rank, port):
    meet(rank, 8, port)
    for groups in (
        ((0, 1, 2, 3, 4, 5, 6, 7),),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 1, 2), (3, 4, 5), (6, 7)),
    ):
        transport, member = connect(wanted, groups)
        assert type(transport) is CLASSES[wanted]
        members = len(next(group for group in groups if rank in group))
        for size in SIZES:
            for owner in range(members):
                read_back(transport, member, owner, size * 8 + owner, size)
    pipe.send("right")
    dist.barrier()


@every_transport
@pytest.mark.timeout(300)
def test_every_byte_arrives_from_every_owner_in_every_size(spawn, free_port, transport):
    """Groups of 8, 4, 3 and 2 ranks, several of them side by side."""
    ranks = [spawn(run_all_owners_and_sizes, transport, rank, free_port) for rank in range(8)]
    assert [rank.get(240) for rank in ranks] == ["right"] * 8


def run_gathers(pipe, wanted, rank, port):
    meet(rank, 3, port)
    transport, _ = connect(wanted, ((0, 1, 2),))
    for owner, (blocks, pages) in enumerate([(9, [64]), (400, [9216, 132]), (3, [5, RING])]):
        ids = torch.arange(0, blocks, 2)
        caches = [contents(size, blocks * size).view(blocks, size) for size in pages]
        expected = torch.cat([cache[ids].flatten() for cache in caches])
        data = torch.full_like(expected, 255)
        gather = PageGather(caches, ids) if rank == owner else None
        transport.start(data, owner, gather).wait()
        assert rank == owner or torch.equal(data, expected), (rank, owner)
    pipe.send("right")
    dist.barrier()


@every_transport
def test_pages_that_the_owner_collects_arrive_as_one_range(spawn, free_port, transport):
    ranks = [spawn(run_gathers, transport, rank, free_port) for rank in range(3)]
    assert [rank.get(60) for rank in ranks] == ["right"] * 3


def run_one_ahead(pipe, wanted, rank, port, world, late_rank):
    """As the engine: wait for one, start the next one, then read; owners write when they may."""
    if rank == late_rank:
        time.sleep(1.0)
    meet(rank, world, port)
    transport, _ = connect(wanted, (tuple(range(world)),))
    shared, local = Random(1), Random(rank)
    plan = [
        (shared.randrange(world), shared.choice([1, 4096, CHUNK_BYTES + 1, RING + 5]))
        for _ in range(100)
    ]
    slots = [torch.empty(RING + 5, dtype=torch.uint8) for _ in range(2)]
    sources = [torch.empty(RING + 5, dtype=torch.uint8) for _ in range(2)]

    def start(number):
        owner, size = plan[number]
        data = (sources if owner == rank else slots)[number % 2][:size]
        if owner == rank:
            data.copy_(contents(number, size))
        return transport.start(data, owner), data

    ahead = start(0)
    for number, (owner, _) in enumerate(plan):
        if rank == late_rank and local.random() < 0.1:
            time.sleep(0.02)
        pending, data = ahead
        pending.wait()
        if owner == rank:
            data.fill_(255)  # peers that still read it would notice
        if number + 1 < len(plan):
            ahead = start(number + 1)
        if owner != rank:
            assert torch.equal(data, contents(number, len(data))), (rank, number)
    pipe.send("right")


@every_transport
@pytest.mark.parametrize(("world", "late_rank"), [(2, 0), (3, 1)])
def test_ranks_drift_apart_and_nothing_is_overwritten_before_it_is_read(
    spawn, free_port, transport, world, late_rank
):
    """Nobody waits for the others at the end: what was sent has to outlive its sender."""
    ranks = [
        spawn(run_one_ahead, transport, rank, free_port, world, late_rank) for rank in range(world)
    ]
    assert [rank.get(100) for rank in ranks] == ["right"] * world


def run_until_error(pipe, wanted, rank, port, size, timeout_s):
    meet(rank, 3, port)
    transport, _ = connect(wanted, ((0, 1, 2),), timeout_s)
    data = torch.zeros(size, dtype=torch.uint8)
    pipe.send("ready")
    pipe.recv()
    number = 0
    try:
        while True:
            transport.start(data, number % 3).wait()
            number += 1
            time.sleep(0.001)
    except PeerError as error:
        pipe.send(str(error))
    pipe.recv()  # alive, so that nobody else's end explains the errors
    with pytest.raises(PeerError):
        transport.start(data, rank).wait()
    pipe.send("still dead")


@pytest.mark.parametrize(
    ("transport", "size"),
    [("collective", 4096), ("shared_memory", 4096), ("shared_memory", 3 * RING)],
)
@pytest.mark.parametrize(("blow", "timeout_s"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 8)])
def test_a_peer_that_dies_or_falls_silent_is_an_error_on_every_rank_in_time(
    spawn, free_port, transport, size, blow, timeout_s
):
    ranks = [
        spawn(run_until_error, transport, rank, free_port, size, timeout_s) for rank in range(3)
    ]
    assert [rank.get(60) for rank in ranks] == ["ready"] * 3
    for rank in ranks:
        rank.put("go")
    time.sleep(0.3)
    os.kill(ranks[1].process.pid, blow)
    messages = [ranks[rank].get(60) for rank in (0, 2)]
    if transport == "shared_memory":
        state = "is gone" if blow == signal.SIGKILL else f"has been silent for {timeout_s} s"
        assert messages == [f"rank 1 of the KVPP group {state}"] * 2
    for rank in (0, 2):
        ranks[rank].put("and now")
        assert ranks[rank].get(60) == "still dead"


def run_and_look_for_files(pipe, rank, port):
    meet(rank, 2, port)
    transport, _ = connect("shared_memory", ((0, 1),))
    read_back(transport, rank, 0, 7, RING)
    maps = Path("/proc/self/maps").read_text().splitlines()
    dist.barrier()
    names = [line.split(maxsplit=5)[-1] for line in maps if " rw-s " in line]
    pipe.send([name for name in names if not name.startswith("anon_inode:")])


def test_the_memory_has_no_name_that_could_be_left_behind(spawn, free_port):
    ranks = [spawn(run_and_look_for_files, rank, free_port) for rank in range(2)]
    for rank in ranks:
        assert rank.get() == ["/memfd:kvpp-staging (deleted)"] * 2


def run_and_die_while_meeting(pipe, rank, port):
    meet(rank, 3, port)
    if rank == 1:
        socket.send_fds = lambda *_: os._exit(1)
    started = time.monotonic()
    with pytest.raises(PeerError):
        connect("auto", ((0, 1, 2),), timeout_s=5)
    pipe.send(time.monotonic() - started)


def test_a_rank_that_dies_while_they_meet_is_an_error_in_time(spawn, free_port):
    ranks = [spawn(run_and_die_while_meeting, rank, free_port) for rank in range(3)]
    assert all(ranks[rank].get(110) < 60 for rank in (0, 2))


def unshare_network():
    """As between containers: abstract sockets of the others cannot be reached."""
    unreachable = socket.socket.connect

    def connect(this, address):
        wrong = address + "x" if this.family == socket.AF_UNIX else address
        unreachable(this, wrong)

    socket.socket.connect = connect


def run_apart(pipe, wanted, rank, port, obstacle):
    meet(rank, 3, port)
    if rank == 1 and obstacle == "machine":
        meeting.machine_id = lambda: "elsewhere"
    if rank == 1 and obstacle == "network":
        unshare_network()
    if obstacle == "processor":
        transports.machine = lambda: "aarch64"
    try:
        transport, _ = connect(wanted, ((0, 1, 2),), timeout_s=5)
    except ConfigError as error:
        pipe.send(str(error))
        return
    read_back(transport, rank, 1, 5, 10_000)
    pipe.send(type(transport).__name__)
    dist.barrier()


@pytest.mark.parametrize("obstacle", ["machine", "network", "processor"])
def test_ranks_that_cannot_share_memory_all_take_the_collective(spawn, free_port, obstacle):
    ranks = [spawn(run_apart, "auto", rank, free_port, obstacle) for rank in range(3)]
    assert [rank.get(110) for rank in ranks] == ["TorchBroadcast"] * 3


def test_ranks_apart_are_an_error_where_shared_memory_is_wanted(spawn, free_port):
    ranks = [spawn(run_apart, "shared_memory", rank, free_port, "machine") for rank in range(3)]
    for rank in ranks:
        assert rank.get() == (
            'additional_config.kvpp.transport is "shared_memory", but the ranks run on 2 machines. '
            'Use "auto"'
        )
