"""KVPP ranks with a made-up model on simulated devices: real engine, real payloads, real layout.

Each layer of a forward with history reads its cache, writes new blocks and reads again, in several
operations, and compares every byte with what a model without KVPP would have there. A forward
without history writes blocks and reads those only.
"""

from dataclasses import dataclass
from functools import cache
from random import Random

import torch
from builders import bundle_stage
from simulated_device import (
    HostBlocking,
    Machine,
    SimulatedDevice,
    SimulatedTransport,
    Wire,
)

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.collective import StreamOrdered
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import GroupLayout, RunningScratch, place_rank, plan_group

BLOCKS, SCRATCH_BLOCKS = 5, 3
POISON = 255


class WrongBytesError(AssertionError):
    """A layer read something else than what it should have."""


@cache
def content(name, block, version):
    """Bytes of one block, unlike those of any other layer, block or version."""
    layer, page_bytes = name
    if version == 0:
        return torch.zeros(page_bytes, dtype=torch.uint8)
    made = Random(f"{layer} {block} {version}").randbytes(page_bytes)
    return torch.tensor(list(made), dtype=torch.uint8)


@dataclass
class Forward:
    """What one forward does; ``before`` and ``after`` hold each layer's blocks' versions."""

    history: bool
    active: list[int]
    written: list[list[int]]
    before: list[list[int]]
    after: list[list[int]]


@dataclass
class Scenario:
    layout: GroupLayout
    forwards: list[Forward]

    @property
    def compact(self):
        return self.layout.scratch.blocks(BLOCKS) < BLOCKS


def random_scenario(seed, mode, *, num_forwards=5):
    random = Random(f"scenario {seed}")
    layers = random.randint(1, 7)
    more = 3 if mode == "one numbering" else 1
    bundles = [[random.choice((4, 8)), *[4] * random.randint(0, more)] for _ in range(layers)]
    scratch = RunningScratch(least=SCRATCH_BLOCKS, most=SCRATCH_BLOCKS)
    layout = plan_group(
        bundle_stage(bundles),
        random.randint(2, 4),
        random.choice((1, 16)),
        None if mode == "full" else scratch,
        "layer" if mode == "one numbering" else "component",
    )
    versions = [[0] * BLOCKS for _ in bundles]
    forwards = []
    for number in range(num_forwards):
        history = number > 0 and random.random() < 0.8
        most = BLOCKS if mode == "full" else SCRATCH_BLOCKS
        active = sorted(random.sample(range(BLOCKS), random.randint(1, most)))
        before = [list(layer) for layer in versions]
        written = [
            sorted(random.sample(active, random.randint(1, len(active))) if history else active)
            for _ in bundles
        ]
        for layer, blocks in zip(versions, written, strict=True):
            for block in blocks:
                layer[block] = number + 1
        if mode == "full" and history:
            active = list(range(BLOCKS))
        after = [list(layer) for layer in versions]
        forwards.append(Forward(history, active, written, before, after))
    return Scenario(layout, forwards)


class SimulatedRank:
    """One rank: its memory, engine and model. ``host`` gives what its host does, call by call."""

    def __init__(self, scenario, rank, machine, wire, *, host_blocking, without):
        self._scenario = scenario
        self._rank = rank
        self.placement = place_rank(scenario.layout, rank, BLOCKS)
        self.memory = torch.full((self.placement.total_bytes,), POISON, dtype=torch.uint8)
        for place in self.placement.components:
            if place.persistent:
                self.memory[place.offset : place.offset + place.size] = 0
        kind = CompactPayload if scenario.compact else FullPayload
        self._payload = kind(self.placement, self.memory)
        self.device = SimulatedDevice(machine, rank, without)
        transport = SimulatedTransport(wire, self.device, rank)
        ordered = HostBlocking(transport) if host_blocking else StreamOrdered(transport)
        self.engine = PrefetchEngine(self.placement, self._payload, ordered, self.device)
        self._ids = []  # all of them, so that no two lie at one address

    def host(self, forward):
        """Calls of one forward, the same number on every rank."""
        layers = range(len(self._scenario.layout.owners))
        if not forward.history:
            return [lambda: (self._use(forward), *(self._compute(forward, i) for i in layers))]
        calls = [lambda: (self._use(forward), self._call("arm"))]
        calls += [lambda i=i: self._layer(forward, i) for i in layers]
        return [*calls, lambda: self._call("finish")]

    def _layer(self, forward, ordinal):
        self._call("acquire", ordinal)
        self._compute(forward, ordinal)
        self._call("release", ordinal)

    def _call(self, method, *arguments):
        owners, device = self._scenario.layout.owners, self.device
        following = arguments[0] + 1 if arguments else 0
        device.calling = method
        device.roles = {
            "compute": self._role(owners[arguments[0]]) if arguments else None,
            "transfer": self._role(owners[following]) if following < len(owners) else None,
        }
        getattr(self.engine, method)(*arguments)

    def _role(self, owner):
        return "owner" if owner == self._rank else "receiver"

    def _use(self, forward):
        """The index tensor is written by the device too, where the allocator put it."""
        if not self._scenario.compact:
            return
        active = forward.active
        blocks = ActiveBlocks(torch.tensor([active]), torch.tensor([len(active)]), BLOCKS)
        ids, right = blocks.ids, blocks.ids.clone()
        ids.zero_()
        if self._ids:
            old = self._ids[-1]
            self.device.queue("reuses memory", lambda: old.fill_(BLOCKS - 1), writes=[old])
        self.device.queue("writes indices", lambda: ids.copy_(right), writes=[ids])
        self._ids.append(ids)
        self._payload.use(blocks)

    def _compute(self, forward, ordinal):
        readable = forward.active if forward.history else forward.written[ordinal]
        if forward.history:
            self._read(forward, ordinal, readable, forward.before[ordinal])
        rows = self._rows(forward, ordinal, forward.written[ordinal])
        for name, block, row in rows:
            made = content(name, block, forward.after[ordinal][block])
            self.device.queue(f"writes {name[0]}", lambda r=row, m=made: r.copy_(m), writes=[row])
        self._read(forward, ordinal, readable, forward.after[ordinal])

    def _read(self, forward, ordinal, blocks, versions):
        for name, block, row in self._rows(forward, ordinal, blocks):
            right = content(name, block, versions[block])
            what = f"rank {self._rank} reads {name[0]}, block {block}"

            def check(row=row, right=right, what=what):
                if not torch.equal(row, right):
                    raise WrongBytesError(f"{what}: {row.tolist()}, expected {right.tolist()}")

            self.device.queue(what, check, reads=[row])

    def _rows(self, forward, ordinal, blocks):
        for component in self._scenario.layout.stage.targets[ordinal].components:
            place = self.placement.by_layer_name[component.layer_name]
            page = component.page_bytes
            for block in blocks:
                row = block
                if self._scenario.compact and not place.persistent:
                    used = forward.active
                    row = place.first_block(len(used)) + used.index(block)
                start = place.offset + row * page
                yield (component.layer_name, page), block, self.memory[start : start + page]

    def check_persistent(self):
        """Everything that this rank owns is what the model has written."""
        last = self._scenario.forwards[-1]
        for ordinal, owner in enumerate(self._scenario.layout.owners):
            if owner != self._rank:
                continue
            for name, block, row in self._rows(last, ordinal, range(BLOCKS)):
                if not torch.equal(row, content(name, block, last.after[ordinal][block])):
                    raise WrongBytesError(f"rank {self._rank} has lost {name[0]}, block {block}")


def run(scenario, seed, *, host_blocking=False, without=None, find_races=True):
    """Run a scenario in the schedule that ``seed`` chooses; give the ranks back.

    Where the host never waits it may queue everything before a device begins.
    """
    machine = Machine(seed, find_races=find_races)
    wire = Wire(machine)
    ranks = [
        SimulatedRank(scenario, rank, machine, wire, host_blocking=host_blocking, without=without)
        for rank in range(scenario.layout.group_size)
    ]
    hosts = [[call for f in scenario.forwards for call in rank.host(f)] for rank in ranks]
    random = Random(f"hosts {seed}")
    ahead = not host_blocking and random.random() < 0.5
    for call in _interleaved(hosts, random, in_step=host_blocking):
        call()
        if not ahead:
            machine.some_steps()
    assert not (ahead and machine.steps), "a host has waited for a device"
    machine.run_all()
    for rank in ranks:
        rank.check_persistent()
    return ranks


def _interleaved(hosts, random, *, in_step):
    """Each host's calls in their order; any host may be ahead of the others unless they block."""
    if in_step:
        for calls in zip(*hosts, strict=True):
            yield from random.sample(calls, len(calls))
        return
    waiting = [list(reversed(calls)) for calls in hosts]
    while waiting := [calls for calls in waiting if calls]:
        yield random.choice(waiting).pop()
