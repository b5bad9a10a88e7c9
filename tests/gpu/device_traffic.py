"""The engine on real streams: layers read, write and dawdle on the device, the host runs ahead.

Every rank knows what the owner has persisted, forward after forward, and counts on the device what
it finds to be otherwise. Kernels that do nothing for a while make ranks and streams fall behind
each other at random, so that a missing event shows.
"""

from random import Random

import torch
import torch.distributed as dist
from builders import bundle_stage

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.collective import create_group_broadcast
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import RunningScratch, place_rank, plan_group
from kvpp_connect.platforms.local import local_device

STAGE = bundle_stage([[4096, 512], [4096], [4096, 512], [4096], [4096], [4096, 512], [4096]])
BLOCKS = 96
SCRATCH_BLOCKS = 24
LONGEST_CYCLES = 3_000_000  # some 2 ms
TIMEOUT_S = 60.0


def meet(rank, ranks, port, name):
    """Join the world over gloo; gives this rank's device."""
    place = local_device(name, rank, ranks)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    return place


def make_transport(place, ranks):
    """The collective between all ranks, as a worker makes it."""
    platform = place.platform
    group = (tuple(range(ranks)),)
    return create_group_broadcast(
        group, platform.collective_backend, TIMEOUT_S, platform.create_group_options
    )


class DeviceRank:
    """One rank's engine and caches; ``wrong`` counts bytes on the device."""

    def __init__(self, mode, rank, ranks, transport, place):
        scratch = RunningScratch(least=SCRATCH_BLOCKS, most=SCRATCH_BLOCKS)
        layout = plan_group(STAGE, ranks, 512, scratch if mode == "compact" else None)
        self.place = place
        self.placement = place_rank(layout, rank, BLOCKS)
        size = self.placement.total_bytes
        self._memory = torch.full((size,), 255, dtype=torch.uint8, device=place.memory)
        for part in self.placement.components:
            if part.persistent:
                self._memory[part.offset : part.offset + part.size] = 0
        self._payload = (CompactPayload if mode == "compact" else FullPayload)(
            self.placement, self._memory
        )
        device = place.platform.create_device()
        self.engine = PrefetchEngine(self.placement, self._payload, transport, device)
        self._expected = {
            part.component.layer_name: torch.zeros(BLOCKS, dtype=torch.uint8, device=place.memory)
            for part in self.placement.components
        }
        self._compact = mode == "compact"
        self._dawdle = Random(f"dawdle {rank}")
        self.wrong = torch.zeros((), dtype=torch.int64, device=place.memory)

    def dawdle(self):
        """Let the current stream do nothing for a while, now and then."""
        if self.place.memory.type == "cuda" and self._dawdle.random() < 0.5:
            torch.cuda._sleep(self._dawdle.randrange(LONGEST_CYCLES))  # noqa: SLF001 - torch's own

    def forward(self, number, random):
        """One forward with history; ``random`` is in the same state on every rank."""
        count = random.randint(1, SCRATCH_BLOCKS) if self._compact else BLOCKS
        active = sorted(random.sample(range(BLOCKS), count))
        ids = torch.tensor(active, device=self.place.memory)
        if self._compact:
            table = torch.tensor([active])
            used = torch.tensor([len(active)])
            self._payload.use(ActiveBlocks(table, used, BLOCKS, self.place.memory))
        self.engine.arm()
        for ordinal in range(len(self.placement.bundles)):
            self.dawdle()  # projections
            self.engine.acquire(ordinal)
            for component in STAGE.targets[ordinal].components:
                self._access(component, active, ids, 1 + (31 * number + 7 * ordinal) % 250, random)
            self.dawdle()  # a slow reader: the slot may not be filled before it is done
            self.engine.release(ordinal)
        self.engine.finish()

    def _access(self, component, active, ids, value, random):
        """Compare all active blocks with what was persisted, then write one of them."""
        part = self.placement.by_layer_name[component.layer_name]
        rows = self._memory[part.offset : part.offset + part.size].view(-1, component.page_bytes)
        first, at = 0, ids
        if self._compact and not part.persistent:
            first = part.first_block(len(active))
            at = torch.arange(first, first + len(active), device=self.place.memory)
        expected = self._expected[component.layer_name]
        self.dawdle()
        self.wrong += (rows[at] != expected[ids].unsqueeze(1)).sum()
        chosen = random.randrange(len(active))
        rows[at[chosen]] = value
        expected[ids[chosen]] = value


def run_forwards(pipe, name, mode, rank, ranks, port, forwards):
    """Body of a rank; answers the bytes that were wrong."""
    place = meet(rank, ranks, port, name)
    member = DeviceRank(mode, rank, ranks, make_transport(place, ranks), place)
    random = Random(f"traffic {mode}")
    for number in range(forwards):
        member.forward(number, random)
    place.finish()
    pipe.send((int(member.wrong), member.engine.counters.broadcasts))
    dist.barrier()


def run_all_owners_and_sizes(pipe, name, rank, ranks, port, sizes):
    """Every owner sends every size; answers whether all bytes arrived, and none beside them."""
    place = meet(rank, ranks, port, name)
    transport = make_transport(place, ranks)
    right = True
    for size in sizes:
        for owner in range(ranks):
            memory = torch.full((size + 128,), 255, dtype=torch.uint8, device=place.memory)
            data = memory[64 : 64 + size]
            made = torch.Generator().manual_seed(size * ranks + owner)
            sent = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)
            if rank == owner:
                data.copy_(sent)
            transport.start(data, owner).wait()
            around = torch.cat([memory[:64], memory[64 + size :]])
            right = right and torch.equal(data.cpu(), sent) and bool((around == 255).all())
    pipe.send(right)
    dist.barrier()


def run_beside_all_reduces(pipe, rank, ranks, port, forwards):
    """Broadcasts beside a model's all-reduces on another NCCL communicator and stream."""
    place = meet(rank, ranks, port, "cuda")
    model = dist.new_group(list(range(ranks)), backend="nccl")
    member = DeviceRank("full", rank, ranks, make_transport(place, ranks), place)
    states = torch.ones(1 << 20, device=place.memory)
    plain = member.dawdle

    def projections():
        plain()
        dist.all_reduce(states, group=model)
        states.div_(ranks)

    member.dawdle = projections
    random = Random("beside all-reduces")
    for number in range(forwards):
        member.forward(number, random)
    place.finish()
    pipe.send((int(member.wrong), float(states.sub(1).abs().max())))
    dist.barrier()
