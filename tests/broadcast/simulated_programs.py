"""What a group of ranks is to do: forwards over random layers and blocks, loads and puts of a pool.

A program says for each forward which version of each layer's blocks it reads and leaves. A version
is a number; ``content`` gives its bytes. Drafts count as one more layer, which every rank holds.
"""

from dataclasses import dataclass, field
from functools import cache
from random import Random

import torch
from builders import bundle_stage

from kvpp_connect.layout import GroupLayout, RunningScratch, plan_group

BLOCKS, SCRATCH_BLOCKS = 6, 4
# The last one is compact with one block table for all components of a layer.
MODES = ("full", "compact", "one numbering")
LOADED = 1000  # versions from here on were not computed but loaded


class WrongBytesError(AssertionError):
    """Somebody read something else than what should have been there."""


@cache
def content(name, page_bytes, block, version):
    """Bytes of one block, unlike those of any other layer, block or version."""
    if version == 0:
        return torch.zeros(page_bytes, dtype=torch.uint8)
    made = Random(f"{name} {block} {version}").randbytes(page_bytes)
    return torch.tensor(list(made), dtype=torch.uint8)


def bytes_of(component, block, version):
    return content(component.layer_name, component.page_bytes, block, version)


def check(what, found, right):
    """Compare lists of blocks' bytes."""
    if not all(map(torch.equal, found, right)):
        found, right = ([row.tolist() for row in rows] for rows in (found, right))
        raise WrongBytesError(f"{what}: {found}, expected {right}")


@dataclass
class Load:
    """Blocks that come from the pool: begun before forward ``begin``, read by forward ``use``.

    Both are one where the layers of a step are loaded while it runs.
    """

    number: int
    begin: int
    use: int
    blocks: list[int]

    @property
    def in_step(self):
        return self.begin == self.use

    @property
    def version(self):
        return LOADED + self.number


@dataclass
class Put:
    """Blocks that go to the pool as forward ``after`` leaves them."""

    number: int
    after: int
    blocks: list[int]


@dataclass
class Forward:
    """What one forward does; ``before`` and ``after`` hold each layer's blocks' versions."""

    number: int
    history: bool
    active: list[int]
    written: list[list[int]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)

    @property
    def touched(self):
        """Blocks that some layer writes."""
        return {block for layer in self.written for block in layer}


@dataclass
class Program:
    layout: GroupLayout
    forwards: list[Forward]
    loads: list[Load]
    puts: list[Put]

    @property
    def compact(self):
        return not self.layout.mirrors_layers

    def components(self, ordinal):
        """Caches of a target layer, or of the drafts behind the last one."""
        targets = self.layout.stage.targets
        return targets[ordinal].components if ordinal < len(targets) else self.layout.stage.drafts

    def load_in(self, forward):
        """What is loaded while this forward runs."""
        return next((ld for ld in self.loads if ld.in_step and ld.use == forward.number), None)


def random_program(seed, mode, *, pool=None, num_forwards=4):
    """A program in one of ``MODES``.

    Args:
        pool: whether there are loads and puts; default: in every second program.
    """
    random = Random(f"program {seed}")
    layout = _random_layout(random, mode)
    forwards = _random_forwards(random, mode, num_forwards)
    loads, puts = [], []
    if pool if pool is not None else random.random() < 0.5:
        loads = _random_loads(random, forwards)
        puts = [
            Put(number, f.number, _some(random, f.active))
            for number, f in enumerate(f for f in forwards if random.random() < 0.5)
        ]
    _write(random, forwards, loads, len(layout.owners) + 1)
    return Program(layout, forwards, loads, puts)


def _random_layout(random, mode):
    more = 1 if mode == "compact" else 2  # components beside the first
    bundles = [
        [random.choice((4, 8)), *[4] * random.randint(0, more)]
        for _ in range(random.choice((1, 2, 2, 3, 3, 4, 5, 6, 7)))
    ]
    drafts = [4] * random.randint(0, 1)
    scratch = RunningScratch(least=SCRATCH_BLOCKS, most=SCRATCH_BLOCKS)
    return plan_group(
        bundle_stage(bundles, drafts),
        random.choice((2, 2, 3, 4)),
        random.choice((1, 16)),
        None if mode == "full" else scratch,
        "layer" if mode == "one numbering" else "component",
    )


def _random_forwards(random, mode, count):
    most = BLOCKS if mode == "full" else SCRATCH_BLOCKS
    forwards = []
    for number in range(count):
        history = number > 0 and random.random() < 0.8
        active = sorted(random.sample(range(BLOCKS), random.randint(1, most)))
        forwards.append(Forward(number, history, active))
    return forwards


def _random_loads(random, forwards):
    loads = []
    for forward in forwards:
        if not forward.history or random.random() < 0.4:
            continue
        begin = random.randint(max(0, forward.number - 2), forward.number)
        between = {b for f in forwards[begin : forward.number] for b in f.active}
        free = [block for block in forward.active if block not in between]
        if free:
            loads.append(Load(len(loads), begin, forward.number, _some(random, free)))
    return sorted(loads, key=lambda load: load.begin)


def _write(random, forwards, loads, layers):
    """Decide who writes what, and so all versions."""
    versions = [[0] * BLOCKS for _ in range(layers)]
    for forward in forwards:
        for load in loads:
            if load.use == forward.number:
                for layer in versions:
                    for block in load.blocks:
                        layer[block] = load.version
        forward.before = [list(layer) for layer in versions]
        for layer in versions:
            blocks = _some(random, forward.active) if forward.history else forward.active
            forward.written.append(blocks)
            for block in blocks:
                layer[block] = forward.number + 1
        forward.after = [list(layer) for layer in versions]


def _some(random, blocks):
    return sorted(random.sample(blocks, random.randint(1, len(blocks))))
