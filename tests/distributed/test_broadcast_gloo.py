"""The engine over real gloo, with a model's memory traffic and without a model."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from builders import bundle_stage, equal_stage
from engine_traffic import Rank, run_forwards

from kvpp_connect.broadcast.collective import create_group_broadcast
from kvpp_connect.broadcast.engine import BroadcastError

pytestmark = pytest.mark.distributed

STAGE = bundle_stage([[64, 32], [64], [64, 32], [64], [64], [64, 32], [64]])


def connect(rank, world, port, group_size, timeout_s):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    groups = tuple(tuple(range(start, start + group_size)) for start in range(0, world, group_size))
    return create_group_broadcast(groups, "gloo", timeout_s)


def run_full(pipe, rank, world, group_size, port):
    transport = connect(rank, world, port, group_size, 60)
    member = Rank(STAGE, rank % group_size, group_size, transport, blocks=5)
    moved = run_forwards(member, 12, salt=rank // group_size)
    pipe.send((member.engine.counters.sent_bytes, member.engine.counters.received_bytes, moved))
    dist.barrier()


@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (3, 3), (4, 2)])
def test_every_rank_reads_what_the_owner_persisted(spawn, free_port, world, group_size):
    children = [spawn(run_full, rank, world, group_size, free_port) for rank in range(world)]
    counted = [child.get(90) for child in children]
    bundle_bytes = sum(bundle.page_bytes for bundle in STAGE.targets) * 5 * 12
    assert all(sent + received == moved == bundle_bytes for sent, received, moved in counted)
    groups = world // group_size
    assert sum(sent for sent, _, _ in counted) == bundle_bytes * groups


def run_compact(pipe, rank, world, port):
    transport = connect(rank, world, port, world, 60)
    member = Rank(equal_stage(7, 64), rank, world, transport, blocks=40, scratch_blocks=9)
    moved = run_forwards(member, 15)
    counters = member.engine.counters
    pipe.send((counters.sent_bytes + counters.received_bytes, moved))
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_compact_reads_the_same_bytes_and_moves_the_active_blocks_only(spawn, free_port, world):
    children = [spawn(run_compact, rank, world, free_port) for rank in range(world)]
    for child in children:
        counted, active = child.get(90)
        assert counted == active


def run_until_peer_dies(pipe, rank, world, port):
    transport = connect(rank, world, port, world, 5)
    member = Rank(STAGE, rank, world, transport, blocks=5)
    pipe.send("ready")
    pipe.recv()
    try:
        while True:
            member.forward()
    except BroadcastError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_is_an_error_on_every_rank_within_the_time_limit(
    spawn, free_port, fate
):
    children = [spawn(run_until_peer_dies, rank, 3, free_port) for rank in range(3)]
    assert [child.get(60) for child in children] == ["ready"] * 3
    for child in children:
        child.put("go")
    time.sleep(0.3)
    os.kill(children[1].process.pid, fate)
    began = time.monotonic()
    for rank in (0, 2):
        message = children[rank].get(60)
        assert f"KVPP rank {rank}" in message
        assert "layer model.layers." in message
        assert "of the KVPP group" in message
    assert time.monotonic() - began < 60  # the limit, and a busy machine
