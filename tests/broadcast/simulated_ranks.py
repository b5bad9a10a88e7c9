"""KVPP ranks with a made-up model on simulated devices: real engine, real payloads, real layout.

Each layer of a forward with history reads its cache, writes new blocks and reads again, in several
operations, and compares every byte with what a model without KVPP would have there. A forward
without history writes blocks and reads those only.
"""

from contextlib import suppress
from random import Random

import torch
from simulated_device import SimulatedDevice
from simulated_machine import DeadlockError, Machine
from simulated_pool import SimulatedPool
from simulated_programs import BLOCKS, LOADED, bytes_of, check
from simulated_shadow import cells
from simulated_wire import HostBlocking, Manners, SimulatedTransport, Wire

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.collective import StreamOrdered
from kvpp_connect.broadcast.engine import BroadcastError, PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import place_rank

POISON = 255


class SimulatedRank:
    """One rank: its memory, engine and model. ``dies_at``: the engine's call that fails."""

    def __init__(self, group, rank, *, host_blocking, dies_at=None):
        self.group, self.rank = group, rank
        self.program = program = group.program
        machine = group.machine
        self.placement = place_rank(program.layout, rank, BLOCKS)
        self.memory = torch.full((self.placement.total_bytes,), POISON, dtype=torch.uint8)
        for place in self.placement.components:
            if place.persistent:
                self.memory[place.offset : place.offset + place.size] = 0
        self._payload = (CompactPayload if program.compact else FullPayload)(
            self.placement, self.memory
        )
        self.name = f"rank {rank}"
        self.device = SimulatedDevice(machine, self.name, machine.stream(f"{self.name} compute"))
        self.device.role_of = self._role_of
        self._transport = SimulatedTransport(group.wire, self.device, rank)
        ordered = HostBlocking if host_blocking else StreamOrdered
        self.pool = SimulatedPool(self) if program.loads or program.puts else None
        self.engine = PrefetchEngine(
            self.placement,
            self._payload,
            ordered(self._transport),
            self.device,
            self.pool.gate if self.pool else None,
        )
        self._calls_left = dies_at
        self.finished = {}  # by forward: its last operation
        self._rows = {}  # parts of memory that were looked at
        self._ids = []  # all of them, so that no two lie at one address
        machine.host(f"{self.name} model", self._run(), in_step=host_blocking)

    def _run(self):
        for forward in self.program.forwards:
            if self.pool:
                yield from self.pool.await_blocks(forward)
            yield
            for ready in self._run_forward(forward):
                yield ready
                if self._calls_left is not None and self._calls_left <= 0:
                    self._die()
                    return
            self.finished[forward.number] = self.device.compute.mark()
            if self.pool:
                self.pool.begin_puts(forward)
            yield

    def _run_forward(self, forward):
        """The model's part and the engine's, call by call, as the worker makes them."""
        layers = range(len(self.program.layout.owners))
        self._use(forward)
        if forward.history:
            self._call("arm", start=self.program.load_in(forward) is None)
            yield
        if self.pool:
            yield from self.pool.begin_step(forward)
        for ordinal in layers:
            if forward.history:
                self._call("acquire", ordinal)
                yield
            self._compute(forward, ordinal)
            if forward.history:
                self._call("release", ordinal)
            self._transport.all_reduce()
            yield
        if forward.history:
            self._call("finish")
        self._compute(forward, len(layers))

    def _call(self, method, *arguments, **keywords):
        self.group.machine.running.doing = method
        self._acquires = arguments[0] if method == "acquire" else None
        getattr(self.engine, method)(*arguments, **keywords)
        if self._calls_left is not None:
            self._calls_left -= 1

    def _role_of(self, kind):
        """What this rank is in the bundle that arrives, or in the one that is started next."""
        owners = self.program.layout.owners
        ordinal = self._acquires if kind == "arrived" else self._transport.started % len(owners)
        return "owner" if owners[ordinal] == self.rank else "receiver"

    def _die(self):
        self.engine.abandon("the forward failed")
        for call in (self.engine.arm, lambda: self.engine.acquire(0), self.engine.finish):
            try:
                call()
            except BroadcastError:
                continue
            raise AssertionError("a dead engine goes on")

    def _use(self, forward):
        """Say which blocks count; their index tensor is the device's work, like all others."""
        if not self.program.compact:
            if self.pool:
                owned = [i for i, o in enumerate(self.program.layout.owners) if o == self.rank]
                caches = [
                    rows for i in owned for _, rows in self.caches(forward, i, forward.active)
                ]
                self._transport.relevant = {cell for rows in caches for cell in cells(rows)}
            return
        active = forward.active
        blocks = ActiveBlocks(torch.tensor([active]), torch.tensor([len(active)]), BLOCKS)
        ids, right = blocks.ids, blocks.ids.clone()
        ids.zero_()
        if self._ids:  # where the allocator puts the next ones
            old = self._ids[-1]
            self.device.queue("reuses memory", lambda: old.fill_(BLOCKS - 1), writes=[old])
        self.device.queue("writes indices", lambda: ids.copy_(right), writes=[ids])
        self._ids.append(ids)
        self._payload.use(blocks)

    def _compute(self, forward, ordinal):
        readable = forward.active if forward.history else forward.written[ordinal]
        if forward.history:
            self._read(forward, ordinal, readable, forward.before[ordinal])
        for component, rows in self.caches(forward, ordinal, forward.written[ordinal]):
            versions = forward.after[ordinal]
            made = [bytes_of(component, b, versions[b]) for b in forward.written[ordinal]]
            self.device.queue(
                f"writes {component.layer_name}",
                lambda r=rows, m=made: [row.copy_(new) for row, new in zip(r, m, strict=True)],
                writes=rows,
            )
        self._read(forward, ordinal, readable, forward.after[ordinal])

    def _read(self, forward, ordinal, blocks, versions):
        for component, rows in self.caches(forward, ordinal, blocks):
            right = [bytes_of(component, block, versions[block]) for block in blocks]
            what = f"reads {component.layer_name}, blocks {blocks}"
            self.device.queue(what, lambda w=what, r=rows, b=right: check(w, r, b), reads=rows)

    def caches(self, forward, ordinal, blocks):
        """Where a forward finds a layer's blocks on this rank: components, and bytes by block."""
        for component in self.program.components(ordinal):
            place, size = self.placement.by_layer_name[component.layer_name], component.page_bytes
            first, numbers = place.offset, blocks
            if self.program.compact and not place.persistent:
                used = forward.active
                first += place.first_block(len(used)) * size
                numbers = [used.index(block) for block in blocks]
            yield component, [self._row(first + n * size, size) for n in numbers]

    def _row(self, begin, size):
        if (begin, size) not in self._rows:
            self._rows[begin, size] = self.memory[begin : begin + size]
        return self._rows[begin, size]

    def kept(self):
        """All caches that this rank really holds: layer, component, bytes by block."""
        last, owners = self.program.forwards[-1], self.program.layout.owners
        for ordinal in range(len(owners) + 1):
            if ordinal == len(owners) or owners[ordinal] == self.rank:
                for component, rows in self.caches(last, ordinal, range(BLOCKS)):
                    yield ordinal, component, rows


class Group:
    """All ranks of a program on one machine."""

    def __init__(
        self, program, seed, *, manners=None, host_blocking=False, dying_rank=None, **machine
    ):
        """``manners``: default is some that end well, which ones the seed says."""
        random = Random(f"group {seed}")
        self.program = program
        self.machine = Machine(seed, **machine)
        size = program.layout.group_size
        some = [Manners(), Manners(meets=True)]
        if not host_blocking:
            some.append(Manners(meets=True, in_order=True))
        self.wire = Wire(self.machine, size, manners or random.choice(some))
        self.ranks = []
        for rank in range(size):
            dies_at = random.randint(1, 20) if rank == dying_rank else None
            self.ranks.append(
                SimulatedRank(self, rank, host_blocking=host_blocking, dies_at=dies_at)
            )

    def run(self):
        """Run to the end; everything that was read and what is left has to be right."""
        self.machine.run()
        last = self.program.forwards[-1].after
        for rank in self.ranks:
            for ordinal, component, rows in rank.kept():
                right = [bytes_of(component, b, last[ordinal][b]) for b in range(BLOCKS)]
                check(f"{rank.name} keeps {component.layer_name}", rows, right)
        return self

    def run_to_its_death(self):
        """Run until nobody goes on; what is kept may be old, but never anything else."""
        with suppress(DeadlockError):
            self.machine.run()
        versions = [*range(len(self.program.forwards) + 1)]
        versions += [LOADED + load.number for load in self.program.loads]
        for rank in self.ranks:
            for _, component, rows in rank.kept():
                for block, row in enumerate(rows):
                    known = [bytes_of(component, block, version) for version in versions]
                    assert any(torch.equal(row, right) for right in known), row.tolist()
        return self


def run(program, seed, **how):
    """Run a program in the schedule that a seed chooses."""
    return Group(program, seed, **how).run()
