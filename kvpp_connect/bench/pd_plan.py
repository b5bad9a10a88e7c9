"""What planning a long prompt's pull costs: descriptors and time, on one core, without I/O.

78 layers of three components, as a sparse model has, owned by eight prefill ranks with KVPP; one
decode rank that holds all of them plans to read 128K tokens. Contiguous blocks are the best case,
blocks without any neighbours on either side the worst.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvpp_connect.bench.pd_pull import BlockOrder
from kvpp_connect.bench.rounds import Spread, spread
from kvpp_connect.connectors.mooncake_v2.routes import plan_routes
from kvpp_connect.connectors.mooncake_v2.transfer_plan import TokenRange, plan_reads
from kvpp_connect.layout import ComponentAddress, EngineManifest, GroupManifest, RankManifest

_T = TypeVar("_T")

TOKENS = 128 * 1024
LAYERS = 78
TOKEN_BYTES = (1152, 128, 4)  # of each component: latent and rope, index keys, their scales
PRODUCER_RANKS = 8
_ORDERS: tuple[BlockOrder, ...] = ("contiguous", "scattered")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """One plan.

    Attributes:
        descriptors: contiguous pieces, each one read.
        route_s: who reads what from whom; once per producer.
        plan: addresses and lengths; once per request.
    """

    block_tokens: int
    blocks: BlockOrder
    descriptors: int
    route_s: float
    plan: Spread


def measure_plans(block_sizes: tuple[int, ...], rounds: int) -> tuple[PlanCost, ...]:
    """Plan on one core of this process.

    Args:
        block_sizes: tokens in a block, on both sides.
        rounds: how often each is planned; one more warms up.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return tuple(_measure(size, order, rounds) for size in block_sizes for order in _ORDERS)
    finally:
        os.sched_setaffinity(0, cores)


def _measure(block_tokens: int, order: BlockOrder, rounds: int) -> PlanCost:
    blocks = TOKENS // block_tokens
    remote = EngineManifest(
        engine_id="bench",
        incarnation="bench",
        num_blocks=2 * blocks,
        block_tokens=block_tokens,
        ranks=tuple(_rank(n, PRODUCER_RANKS, block_tokens) for n in range(PRODUCER_RANKS)),
    )
    local = GroupManifest(
        num_blocks=2 * blocks, block_tokens=block_tokens, ranks=(_rank(0, 1, block_tokens),)
    )
    tokens = TokenRange(
        first=0,
        end=TOKENS,
        local_block_ids=_ids(blocks, order, 0),
        remote_block_ids=_ids(blocks, order, 1),
    )
    route_s, routes = _timed(lambda: plan_routes(remote, local, "shared"))
    shard = local.ranks[0].shard
    times: list[float] = []
    descriptors = 0
    for _ in range(rounds + 1):
        taken, reads = _timed(
            lambda: plan_reads(
                routes[0].from_producer, tokens, local=local, remote=remote, shard=shard
            )
        )
        times.append(taken)
        descriptors = sum(read.pieces for read in reads)
    return PlanCost(
        block_tokens=block_tokens,
        blocks=order,
        descriptors=descriptors,
        route_s=route_s,
        plan=spread(times[1:]),
    )


def _rank(rank: int, ranks: int, block_tokens: int) -> RankManifest:
    """A rank that owns every ``ranks``-th layer; addresses that no other component has."""
    return RankManifest(
        pp_rank=0,
        rank_in_group=rank,
        session=f"127.0.0.1:{10_000 + rank}",
        components=tuple(
            ComponentAddress(
                layer_name=f"layers.{layer}.{part}",
                address=(1 + layer * len(TOKEN_BYTES) + part) << 40,
                page_bytes=token_bytes * block_tokens,
                block_stride_bytes=token_bytes * block_tokens,
                token_bytes=token_bytes,
                dtype="torch.uint8",
            )
            for layer in range(rank, LAYERS, ranks)
            for part, token_bytes in enumerate(TOKEN_BYTES)
        ),
    )


def _ids(blocks: int, order: BlockOrder, seed: int) -> Sequence[int]:
    ids = list(range(blocks))
    if order == "scattered":
        random.Random(seed).shuffle(ids)
        ids = [2 * block for block in ids]
    return ids


def _timed(work: Callable[[], _T]) -> tuple[float, _T]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result
