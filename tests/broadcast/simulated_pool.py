"""A KV pool's side of a simulated rank: the real copier, with threads and a stream of its own.

What vLLM's scheduler promises to a connector is kept by the ranks' hosts: blocks are not written
while somebody puts them, and not loaded while a forward uses them.
"""

import torch
from simulated_device import SimulatedDevice
from simulated_programs import BLOCKS, bytes_of, check

from kvpp_connect.connectors.ascend_store.copying import HEADER_BYTES, DeviceCopier
from kvpp_connect.connectors.ascend_store.layerwise import OwnedLayersGate

MOST_BYTES = 256  # of an object here


class SimulatedPool:
    """One rank's loads and puts, each in the order of the program."""

    def __init__(self, rank):
        self._rank = rank
        self._program = rank.program
        self._machine = machine = rank.group.machine
        name = f"{rank.name} pool"
        self.device = SimulatedDevice(machine, name, rank.device.compute, makes_tensors=True)
        self._copier = DeviceCopier(self.device, torch.device("cpu"))
        self.gate = OwnedLayersGate(self, rank.placement)
        self._told = {}  # what a host knew when it said something; who hears it knows that too
        self._marks = {}
        self._step = None  # the load of the layers of the forward that runs
        owners = self._program.layout.owners
        self._drafts = [len(owners)] if self._program.layout.stage.drafts else []
        self._held = self._drafts + [i for i, o in enumerate(owners) if o == rank.rank]
        self._ordinals = {
            component.layer_name: ordinal
            for ordinal in range(len(owners))
            for component in self._program.components(ordinal)
        }
        self._staging = torch.zeros((2, BLOCKS, MOST_BYTES), dtype=torch.uint8)
        machine.host(f"{name} loads", self._load_all())
        machine.host(f"{name} puts", self._put_all())

    def _tell(self, *what):
        self._told[what] = self._machine.running.seen

    def hear(self, *what):
        """Steps that wait until a host of this rank says something."""
        host = self._machine.running
        yield lambda: what in self._told
        host.seen |= self._told[what]

    # What the rank's model host does, for the scheduler and for the connector.

    def await_blocks(self, forward):
        """Wait for what the scheduler waits for before it hands out a forward's blocks."""
        machine, pools = self._machine, [rank.pool for rank in self._rank.group.ranks]
        machine.running.doing = f"waits for the blocks of forward {forward.number}"
        loads = [load for load in self._program.loads if load.begin == forward.number]
        taken = forward.touched.union(*(load.blocks for load in loads))
        for put in self._program.puts:
            if put.after < forward.number and taken & set(put.blocks) and machine.keeps("held"):
                for pool in pools:
                    yield from pool.hear("stored", put.number)
        for load in self._program.loads:
            if load.use == forward.number and not load.in_step and machine.keeps("received"):
                for pool in pools:
                    yield from pool.hear("received", load.number)
        for load in loads:
            yield from self._await_users(load)
            self._tell("load", load.number)

    def _await_users(self, load):
        """Steps in flight may still use a load's blocks; beside a load within a step are none."""
        earlier = self._program.forwards[: load.begin]
        users = [f for f in earlier if load.in_step or set(f.active) & set(load.blocks)]
        if users and self._machine.keeps("freed"):
            for rank in self._rank.group.ranks:
                yield lambda r=rank: users[-1].number in r.finished
                self._machine.running.owes = rank.finished[users[-1].number]
                yield from self._machine.settled()

    def begin_step(self, forward):
        """Drafts are there before the step, other layers come while it runs."""
        self._step = self._program.load_in(forward)
        if self._step is not None:
            for ordinal in self._drafts:
                yield from self.hear("ready", self._step.number, ordinal)

    def begin_puts(self, forward):
        for put in self._program.puts:
            if put.after == forward.number:
                self._machine.running.doing = "mark"
                self._marks[put.number] = self._copier.mark()
                self._tell("put", put.number)

    def is_ready(self, layer_name):
        """For the gate: whether a layer of the running step may be read."""
        what = ("ready", self._step.number, self._ordinals[layer_name]) if self._step else None
        if what is None or not self._machine.keeps("gate"):
            return True
        self._machine.running.seen |= self._told.get(what, 0)
        return what in self._told

    def wait(self, layer_name):
        self._machine.running.doing = "waits at the gate"
        self._machine.block(lambda: self.is_ready(layer_name), alone=True)
        self._machine.running.doing = "acquire"

    # What the threads do.

    def _load_all(self):
        for load in self._program.loads:
            yield from self.hear("load", load.number)
            for ordinal in self._held:
                rows, caches, components = self._object([ordinal], load.blocks, 0)
                row = [
                    torch.cat([bytes_of(c, block, load.version) for c in components])
                    for block in load.blocks
                ]
                self._machine.host_works(
                    "fetches",
                    lambda t=rows[:, HEADER_BYTES:], s=row: t.copy_(torch.stack(s)),
                    writes=[rows],
                )
                self._machine.running.doing = "scatter"
                self._copier.scatter(rows, caches, load.blocks)
                yield from self._machine.settled()
                self._tell("ready", load.number, ordinal)
                yield
            self._tell("received", load.number)

    def _put_all(self):
        for put in self._program.puts:
            yield from self.hear("put", put.number)
            ordinals = [i for i in self._held if i not in self._drafts or self._rank.rank == 0]
            if ordinals:
                rows, caches, components = self._object(ordinals, put.blocks, 1)
                versions = [
                    self._program.forwards[put.after].after[i]
                    for i in ordinals
                    for _ in self._program.components(i)
                ]
                right = [
                    torch.cat(
                        [bytes_of(c, b, v[b]) for c, v in zip(components, versions, strict=True)]
                    )
                    for b in put.blocks
                ]
                self._machine.running.doing = "gather"
                self._copier.gather(caches, put.blocks, rows, self._marks[put.number])
                yield from self._machine.settled()
                self._machine.host_works(
                    "stores",
                    lambda r=rows[:, HEADER_BYTES:], e=right: check("stores", [*r], e),
                    reads=[rows],
                )
            self._tell("stored", put.number)
            yield

    def _object(self, ordinals, blocks, half):
        """Rows of staging, and the caches that lie in them one after the other."""
        components = [c for i in ordinals for c in self._program.components(i)]
        size = HEADER_BYTES + sum(c.page_bytes for c in components)
        caches = []
        for component in components:
            place = self._rank.placement.by_layer_name[component.layer_name]
            kept = self._rank.memory[place.offset : place.offset + place.size]
            caches.append(kept.view(BLOCKS, component.page_bytes))
        return self._staging[half, : len(blocks), :size], caches, components
