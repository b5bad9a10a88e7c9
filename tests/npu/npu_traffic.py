"""Engine and collective on one device per rank: an NPU each, or the CPU.

The host runs ahead of the device and never waits for it in a forward. Every rank knows what the
owners have persisted, and counts on the device what it finds to be otherwise.
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
from kvpp_connect.platforms.base import select_platform

# Latent, rope and index keys, as a sparse layer has them; the last layers have no indexer.
STAGE = bundle_stage([[131072, 16384, 32768]] * 5 + [[131072, 16384]] * 2)
BLOCKS, SCRATCH_BLOCKS = 48, 12
TIMEOUT_S = 60.0


def join(name, rank, ranks, port):
    """Choose this rank's device and meet the others; the device of tensors and the transport."""
    place = torch.device("cpu")
    if name == "npu":
        import torch_npu

        torch_npu.npu.set_device(rank)
        place = torch.device("npu", rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    backend = select_platform(name).collective_backend
    return place, create_group_broadcast((tuple(range(ranks)),), backend, TIMEOUT_S)


class TrafficRank:
    """One rank's engine and caches."""

    def __init__(self, name, mode, rank, ranks, port):
        platform = select_platform(name)
        self._place, transport = join(name, rank, ranks, port)
        scratch = RunningScratch(least=SCRATCH_BLOCKS, most=SCRATCH_BLOCKS)
        layout = plan_group(
            STAGE,
            ranks,
            platform.alignment_bytes,
            scratch if mode == "compact" else None,
            "layer",
        )
        self._placement = place_rank(layout, rank, BLOCKS)
        size = self._placement.total_bytes
        self._memory = torch.full((size,), 99, dtype=torch.int8, device=self._place)
        for part in self._placement.components:
            if part.persistent:
                self._memory[part.offset : part.offset + part.size] = 0
        self._compact = mode == "compact"
        kind = CompactPayload if self._compact else FullPayload
        self._payload = kind(self._placement, self._memory)
        self._device = platform.create_device()
        self.engine = PrefetchEngine(self._placement, self._payload, transport, self._device)
        self._expected = {
            part.component.layer_name: torch.zeros(BLOCKS, dtype=torch.int8, device=self._place)
            for part in self._placement.components
        }
        self._wrong = torch.zeros((), dtype=torch.int64, device=self._place)

    def forward(self, number, random):
        """One forward with history; ``random`` is in the same state on every rank."""
        active = sorted(random.sample(range(BLOCKS), random.randint(1, SCRATCH_BLOCKS)))
        if self._compact:
            table, used = torch.tensor([active]), torch.tensor([len(active)])
            self._payload.use(ActiveBlocks(table, used, BLOCKS, self._place))
        self.engine.arm()
        for ordinal, bundle in enumerate(STAGE.targets):
            self.engine.acquire(ordinal)
            for component in bundle.components:
                self._access(component, active, 1 + (31 * number + 7 * ordinal) % 90, random)
            self.engine.release(ordinal)
        self.engine.finish()

    def _access(self, component, active, value, random):
        """Compare all active blocks with what was persisted, then write one of them."""
        part = self._placement.by_layer_name[component.layer_name]
        rows = self._memory[part.offset : part.offset + part.size].view(-1, component.page_bytes)
        ids = torch.tensor(active, device=self._place)
        renumbered = self._compact and not part.persistent
        at = torch.arange(len(active), device=self._place) if renumbered else ids
        expected = self._expected[component.layer_name]
        self._wrong += (rows[at] != expected[ids].unsqueeze(1)).sum()
        chosen = random.randrange(len(active))
        rows[at[chosen]] = value
        expected[ids[chosen]] = value

    def wrong_bytes(self):
        self._device.finish_transfers()
        return int(self._wrong)


def run_forwards(pipe, name, mode, ranks, port, forwards, rank):
    """Body of a rank; answers the bytes that were wrong."""
    member = TrafficRank(name, mode, rank, ranks, port)
    random = Random(f"traffic {mode}")
    for number in range(forwards):
        member.forward(number, random)
    pipe.send(member.wrong_bytes())
    dist.barrier()


def run_all_owners_and_sizes(pipe, name, ranks, port, sizes, rank):
    """Every owner sends every size, two under way at once; answers whether all arrived right."""
    place, transport = join(name, rank, ranks, port)
    right = True
    for size in sizes:
        for owner in range(ranks):
            memory = torch.full((2 * size + 192,), -1, dtype=torch.int8, device=place)
            parts = [memory[64 : 64 + size], memory[128 + size : 128 + 2 * size]]
            made = torch.Generator().manual_seed(size * ranks + owner)
            sent = torch.randint(0, 100, (2, size), dtype=torch.int8, generator=made)
            if rank == owner:
                for part, values in zip(parts, sent, strict=True):
                    part.copy_(values)
            for pending in [transport.start(part, owner) for part in parts]:
                pending.wait()
            around = torch.cat([memory[:64], memory[64 + size : 128 + size], memory[-64:]])
            arrived = all(torch.equal(p.cpu(), v) for p, v in zip(parts, sent, strict=True))
            right = right and arrived and bool((around == -1).all())
    pipe.send(right)
    dist.barrier()
