"""Memory traffic of a model without the model: each layer reads its cache and writes new blocks.

Every rank of a group runs the same forwards, and what it reads has to be what the owner persisted,
forward after forward.
"""

import time
from functools import partial
from random import Random

import torch

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import RunningScratch, place_rank, plan_group
from kvpp_connect.platforms.cpu import CpuDevice


class Rank:
    """One rank's engine and memory; scratch is poisoned."""

    def __init__(self, stage, rank, group_size, transport, *, blocks, scratch_blocks=None):
        scratch = scratch_blocks and RunningScratch(least=scratch_blocks, most=scratch_blocks)
        self.rank = rank
        self.blocks = blocks
        self.scratch_blocks = scratch_blocks
        self.placement = place_rank(plan_group(stage, group_size, 1, scratch), rank, blocks)
        self._memory = torch.full((self.placement.total_bytes,), 255, dtype=torch.uint8)
        for place in self.placement.components:
            if place.persistent:
                self._memory[place.offset : place.offset + place.size] = 0
        payload = CompactPayload if scratch_blocks else FullPayload
        self._payload = payload(self.placement, self._memory)
        self.engine = PrefetchEngine(self.placement, self._payload, transport, CpuDevice())

    def forward(self, active=None, layer=lambda ordinal, caches: None):
        """One forward with history.

        Args:
            active: in compact mode the ids of the blocks that it uses.
            layer: called when a layer has its cache, with views ``(name, row of a block)``.
        """
        if active is not None:
            used = torch.tensor([len(active)])
            self._payload.use(ActiveBlocks(torch.tensor([active]), used, self.blocks))
        self.engine.arm()
        for ordinal in range(len(self.placement.bundles)):
            self.engine.acquire(ordinal)
            layer(ordinal, self._caches(ordinal, active))
            self.engine.release(ordinal)
        self.engine.finish()

    def _caches(self, ordinal, active):
        """``(layer name, {block id: its bytes})`` for each component."""
        for component in self.placement.layout.stage.targets[ordinal].components:
            place = self.placement.by_layer_name[component.layer_name]
            rows = self._memory[place.offset : place.offset + place.size]
            rows = rows.view(-1, component.page_bytes)
            if active is None:
                yield component.layer_name, dict(enumerate(rows))
            elif place.persistent:
                yield component.layer_name, {block: rows[block] for block in active}
            else:
                first = place.first_block(len(active))
                yield component.layer_name, {b: rows[first + i] for i, b in enumerate(active)}


def run_forwards(rank, forwards, salt=0):
    """Drive a rank through forwards that check every byte; give the bytes that had to move.

    Args:
        salt: makes the bytes of this group unlike those of others.
    """
    random = Random(salt)
    expected, moved = {}, 0

    def layer(number, ordinal, caches):
        nonlocal moved
        if (rank.rank + number) % 3 == 0:
            time.sleep(0.002)  # ranks drift apart
        for name, blocks in caches:
            for block, row in blocks.items():
                assert (row == expected.get((name, block), 0)).all(), (rank.rank, number, name)
                moved += len(row)
            block = random.choice(list(blocks))
            value = (17 * salt + 31 * number + 7 * ordinal) % 200 + 1
            blocks[block][:] = value
            expected[name, block] = value

    for number in range(forwards):
        active = None
        if rank.scratch_blocks is not None:
            count = random.randint(1, rank.scratch_blocks)
            active = sorted(random.sample(range(rank.blocks), count))
        rank.forward(active, partial(layer, number))
    return moved
