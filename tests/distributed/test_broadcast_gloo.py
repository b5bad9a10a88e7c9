"""The engine over real gloo, with a model's memory traffic and without a model.

Every rank runs the same forwards: each layer reads all its blocks and writes new ones, as attention
does. What a rank reads has to be what the owner persisted, forward after forward.
"""

import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from builders import bundle_stage, equal_stage

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.collective import create_group_broadcast
from kvpp_connect.broadcast.engine import BroadcastError, PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import RunningScratch, place_rank, plan_group

pytestmark = pytest.mark.distributed

BLOCKS = 5
STAGE = bundle_stage([[64, 32], [64], [64, 32], [64], [64], [64, 32], [64]])


def connect(rank, world, port, group_size, timeout_s):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    groups = tuple(tuple(range(start, start + group_size)) for start in range(0, world, group_size))
    return create_group_broadcast(groups, "gloo", timeout_s)


def build_engine(rank, group_size, transport):
    placement = place_rank(plan_group(STAGE, group_size), rank, BLOCKS)
    memory = torch.full((placement.total_bytes,), 255, dtype=torch.uint8)
    for place in placement.components:
        if place.persistent:
            memory[place.offset : place.offset + place.size] = 0
    return PrefetchEngine(placement, FullPayload(placement, memory), transport), placement, memory


def caches(placement, memory, ordinal):
    for component in placement.layout.stage.targets[ordinal].components:
        place = placement.by_layer_name[component.layer_name]
        view = memory[place.offset : place.offset + place.size]
        yield component.layer_name, view.view(BLOCKS, component.page_bytes)


def run_forwards(pipe, rank, world, group_size, port):
    transport = connect(rank, world, port, group_size, 60)
    member = rank % group_size
    engine, placement, memory = build_engine(member, group_size, transport)
    group = rank // group_size
    expected = {}
    for forward in range(12):
        engine.arm()
        for ordinal in range(len(STAGE.targets)):
            if (member + forward) % 3 == 0:
                time.sleep(0.002)  # ranks drift apart
            engine.acquire(ordinal)
            for name, cache in caches(placement, memory, ordinal):
                for block in range(BLOCKS):
                    want = expected.get((name, block), 0)
                    assert (cache[block] == want).all(), (rank, forward, name, block)
                block = (forward + ordinal) % BLOCKS
                value = (17 * group + 31 * forward + 7 * ordinal) % 200 + 1
                cache[block] = value
                expected[name, block] = value
        engine.finish()
    pipe.send((engine.counters.sent_bytes, engine.counters.received_bytes))
    dist.barrier()


@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (3, 3), (4, 2)])
def test_every_rank_reads_what_the_owner_persisted(spawn, free_port, world, group_size):
    children = [spawn(run_forwards, rank, world, group_size, free_port) for rank in range(world)]
    counted = [child.get(90) for child in children]
    bundle_bytes = sum(bundle.page_bytes for bundle in STAGE.targets) * BLOCKS * 12
    assert all(sent + received == bundle_bytes for sent, received in counted)
    groups = world // group_size
    assert sum(sent for sent, _ in counted) == bundle_bytes * groups


def run_compact_forwards(pipe, rank, world, port):
    """Layers read and write the active blocks only, those in scratch by their position."""
    transport = connect(rank, world, port, world, 60)
    page, blocks, scratch_blocks = 64, 40, 9
    stage = equal_stage(7, page)
    scratch = RunningScratch(least=scratch_blocks, most=scratch_blocks)
    placement = place_rank(plan_group(stage, world, 1, scratch), rank, blocks)
    memory = torch.full((placement.total_bytes,), 255, dtype=torch.uint8)
    for place in placement.components:
        if place.persistent:
            memory[place.offset : place.offset + place.size] = 0
    payload = CompactPayload(placement, memory)
    engine = PrefetchEngine(placement, payload, transport)
    random = Random(3)
    expected, moved = {}, 0
    for forward in range(15):
        ids = sorted(random.sample(range(blocks), random.randint(1, scratch_blocks)))
        active = ActiveBlocks(torch.tensor([ids]), torch.tensor([len(ids)]), blocks)
        payload.use(active)
        engine.arm()
        for ordinal in range(7):
            engine.acquire(ordinal)
            place = placement.components[ordinal]
            view = memory[place.offset : place.offset + place.size].view(-1, page)
            for position, block in enumerate(ids):
                row = block if place.persistent else position
                want = expected.get((ordinal, block), 0)
                assert (view[row] == want).all(), (rank, forward, ordinal, block)
            block = random.choice(ids)
            row = block if place.persistent else ids.index(block)
            value = (31 * forward + 7 * ordinal) % 200 + 1
            view[row] = value
            expected[ordinal, block] = value
        engine.finish()
        moved += len(ids) * page * 7
    pipe.send((engine.counters.sent_bytes + engine.counters.received_bytes, moved))
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_compact_reads_the_same_bytes_and_moves_the_active_blocks_only(spawn, free_port, world):
    children = [spawn(run_compact_forwards, rank, world, free_port) for rank in range(world)]
    for child in children:
        counted, active = child.get(90)
        assert counted == active


def run_until_peer_dies(pipe, rank, world, port):
    transport = connect(rank, world, port, world, 20)
    engine, _, _ = build_engine(rank, world, transport)
    pipe.send("ready")
    pipe.recv()
    try:
        while True:
            engine.arm()
            for ordinal in range(len(STAGE.targets)):
                engine.acquire(ordinal)
            engine.finish()
    except BroadcastError as error:
        pipe.send(str(error))


def test_a_peer_that_dies_is_an_error_that_names_rank_and_layer_and_never_a_hang(spawn, free_port):
    children = [spawn(run_until_peer_dies, rank, 3, free_port) for rank in range(3)]
    assert [child.get(60) for child in children] == ["ready"] * 3
    for child in children:
        child.put("go")
    time.sleep(0.3)
    children[1].kill()
    for rank in (0, 2):
        message = children[rank].get(60)
        assert f"KVPP rank {rank}" in message
        assert "layer model.layers." in message
