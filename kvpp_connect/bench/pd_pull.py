"""How fast KV is pulled from a prefill node, and how many bytes leave it.

Two producer ranks, processes of their own, hold half of the layers each, as KVPP places them. A
decode group of one or several ranks, processes as well, pulls a prompt through the connector's own
puller, control channel included: manifest, reads, confirmation. With one rank, Mooncake's
``batch_transfer_sync_read`` of the same pieces, one call for each producer rank at once, is
measured in turn with it, so that other load on the machine hits both alike.

The decode node's scheduler side is left out: leases are held for the whole run.
"""

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from kvpp_connect.bench.local_ranks import run_ranks
from kvpp_connect.bench.rounds import Spread, spread, timed
from kvpp_connect.connectors.caches import (
    BlockShape,
    describe_caches,
    register_storage,
)
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.exchange import ShareExchange
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, parse_remote_prefill
from kvpp_connect.connectors.mooncake_v2.producer import Producer
from kvpp_connect.connectors.mooncake_v2.producers import ProducerLink
from kvpp_connect.connectors.mooncake_v2.puller import Puller, PullOptions
from kvpp_connect.connectors.mooncake_v2.routes import PullMode
from kvpp_connect.connectors.mooncake_v2.transfer_plan import TokenRange, plan_reads
from kvpp_connect.errors import KvppError, PeerError
from kvpp_connect.layout import GroupManifest, RankManifest

BlockOrder = Literal["contiguous", "scattered"]

_HOST = "127.0.0.1"
_PRODUCER_RANKS = 2
_BLOCK_TOKENS = 16
_ROW_WORDS = 576  # of 4 bytes: what MLA keeps of a token in float32
_POLL_S = 0.0002
_CONTROL_S, _HOLD_S = 10.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSetting:
    """What is pulled.

    Attributes:
        tokens: of the prompt; whole blocks of 16.
        layers: of the model, at 2,304 bytes per token.
        rounds: measured pulls; one more warms up.
        limit_s: seconds for one decode group.
    """

    tokens: int
    layers: int
    rounds: int
    limit_s: float

    @property
    def kv_bytes(self) -> int:
        """KV of the prompt over all layers, once."""
        return self.tokens * self.layers * _ROW_WORDS * 4

    @property
    def shape(self) -> BlockShape:
        """Twice the blocks that the prompt needs, so that they can lie scattered."""
        return BlockShape(num_blocks=2 * self.blocks, block_tokens=_BLOCK_TOKENS)

    @property
    def blocks(self) -> int:
        """Blocks of the prompt."""
        return self.tokens // _BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpeed:
    """One decode group's pulls.

    Attributes:
        pieces: contiguous ranges read from the producer, over all ranks.
        pull: until the last rank has all of its bytes and the producer's confirmation.
        kv_bytes_per_s: the prompt's KV, counted once, over the median.
        raw: the same pieces by Mooncake alone; for one rank.
        raw_ratio: goodput of the pull to that of the raw read.
        producer_bytes_per_kv_byte: bytes that leave the prefill node.
        peer_bytes_per_kv_byte: bytes that ranks of the decode group read from each other.
    """

    ranks: int
    mode: PullMode
    blocks: BlockOrder
    pieces: int
    pull: Spread
    kv_bytes_per_s: float
    raw: Spread | None
    raw_ratio: float | None
    producer_bytes_per_kv_byte: float
    peer_bytes_per_kv_byte: float


def measure_pulls(setting: PullSetting, group_sizes: tuple[int, ...]) -> tuple[PullSpeed, ...]:
    """Pull with decode groups of several sizes, in both modes, from blocks in both orders.

    Raises:
        KvppError: a pull failed, bytes are wrong, or the time is up.
    """
    speeds: list[PullSpeed] = []
    with _producer(setting) as hand_over:
        cores = tuple(os.sched_getaffinity(0))
        for ranks, order in itertools.product(group_sizes, ("contiguous", "scattered")):
            modes: tuple[PullMode, ...] = ("direct",) if ranks == 1 else ("direct", "shared")
            for mode in modes:
                theirs, ours = _block_ids(setting, order, 0), _block_ids(setting, order, 1)
                job = _Job(setting, mode, order, hand_over(theirs), theirs, ours, cores)
                speeds.append(run_ranks(_pull_on_rank, ranks, setting.limit_s, job))
    return tuple(speeds)


@dataclass(frozen=True, slots=True)
class _Job:
    setting: PullSetting
    mode: PullMode
    order: BlockOrder
    params: dict[str, Any]
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    cores: tuple[int, ...]


def _block_ids(setting: PullSetting, order: str, seed: int) -> tuple[int, ...]:
    ids = list(range(setting.blocks))
    if order == "scattered":
        # Never neighbours, so each block is a piece of its own.
        random.Random(seed).shuffle(ids)
        ids = [2 * block for block in ids]
    return tuple(ids)


# The producer


@contextmanager
def _producer(
    setting: PullSetting,
) -> Iterator[Callable[[tuple[int, ...]], dict[str, Any]]]:
    """A prefill node that has computed the prompt; answers hand-overs of its blocks."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    producer = Producer(engine_id="bench", host=_HOST, port=0, lease_s=86_400.0)
    prompt = [0] * setting.tokens
    numbers = itertools.count()
    try:
        for rank in range(_PRODUCER_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_hold_caches, args=(theirs, rank, setting))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        manifests = [_receive(pipe, setting.limit_s) for pipe in pipes]
        producer.publish(_group(setting, manifests))
        yield lambda block_ids: producer.hand_over(f"bench{next(numbers)}", prompt, block_ids)
    finally:
        producer.close()
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection, limit_s: float) -> RankManifest:
    try:
        if pipe.poll(limit_s):
            return pipe.recv()
    except EOFError:
        pass
    raise PeerError(f"a producer rank of the benchmark did not start within {limit_s:g} s")


def _hold_caches(pipe: Connection, rank: int, setting: PullSetting) -> None:
    """Body of a producer rank: its layers' caches, full of bytes that say where they belong."""
    _silence_mooncake()
    first = rank * setting.layers // _PRODUCER_RANKS
    end = (rank + 1) * setting.layers // _PRODUCER_RANKS
    caches = _caches(range(first, end), setting)
    for layer, cache in zip(range(first, end), caches.values(), strict=True):
        cache.copy_(_contents(layer, range(setting.shape.num_blocks)).view_as(cache))
    engine = MooncakeEngine(_HOST, "tcp")
    register_storage(engine, caches)
    pipe.send(_manifest(caches, rank, engine, setting))
    pipe.recv()  # until the pipe breaks, or the process is ended


def _silence_mooncake() -> None:
    """No report of each engine's start between the tables; read when mooncake is loaded."""
    os.environ.setdefault("GLOG_minloglevel", "3")


def _caches(layers: range, setting: PullSetting) -> dict[str, torch.Tensor]:
    shape = (len(layers), setting.shape.num_blocks, 1, _BLOCK_TOKENS, _ROW_WORDS)
    memory = torch.zeros(shape, dtype=torch.int32)
    return {f"layers.{layer}": memory[index] for index, layer in enumerate(layers)}


def _contents(layer: int, block_ids: range | tuple[int, ...]) -> torch.Tensor:
    """What a layer holds in some blocks, shape (blocks, words)."""
    words = torch.arange(_BLOCK_TOKENS * _ROW_WORDS, dtype=torch.int32)
    starts = torch.tensor(list(block_ids), dtype=torch.int32) * 104_729 + layer * 7_919
    return starts[:, None] + words


def _manifest(
    caches: dict[str, torch.Tensor], rank: int, engine: MooncakeEngine, setting: PullSetting
) -> RankManifest:
    return RankManifest(
        pp_rank=0,
        rank_in_group=rank,
        session=engine.session,
        components=describe_caches(caches, setting.shape, None),
    )


def _group(setting: PullSetting, ranks: list[RankManifest]) -> GroupManifest:
    shape = setting.shape
    return GroupManifest(
        num_blocks=shape.num_blocks, block_tokens=shape.block_tokens, ranks=tuple(ranks)
    )


# A decode rank


def _pull_on_rank(job: _Job) -> PullSpeed:
    # Mooncake's threads may run where they like, as in a server.
    os.sched_setaffinity(0, job.cores)
    _silence_mooncake()
    reader = _DecodeRank(job)
    ranks = dist.get_world_size()
    pulls: list[float] = []
    raws: list[float] = []
    for _ in range(job.setting.rounds + 1):  # the first one warms up
        pulls.append(timed(reader.pull))
        reader.check()
        if ranks == 1:
            raws.append(timed(reader.read_raw))
            reader.check()
    reader.close()
    pull = spread(pulls[1:])
    raw = spread(raws[1:]) if raws else None
    read, shared, pieces = _summed(reader.counted())
    total = job.setting.kv_bytes * len(pulls)
    return PullSpeed(
        ranks=ranks,
        mode=job.mode,
        blocks=job.order,
        pieces=round(pieces / len(pulls)),
        pull=pull,
        kv_bytes_per_s=job.setting.kv_bytes / pull.median_s,
        raw=raw,
        raw_ratio=raw.median_s / pull.median_s if raw else None,
        producer_bytes_per_kv_byte=read / total,
        peer_bytes_per_kv_byte=shared / total,
    )


class _DecodeRank:
    """One rank of a decode group that holds all layers."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._caches = _caches(range(job.setting.layers), job.setting)
        self._engine = MooncakeEngine(_HOST, "tcp")
        register_storage(self._engine, self._caches)
        rank = dist.get_rank()
        self._exchange = ShareExchange(rank, _HOST)
        mine = _manifest(self._caches, rank, self._engine, job.setting), self._exchange.address
        cards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(cards, mine)
        self._exchange.connect({n: card[1] for n, card in enumerate(cards) if n != rank})
        self._group = _group(job.setting, [card[0] for card in cards])
        self._stats = PullStats(counts_tokens=rank == 0)
        self._puller = Puller(
            engine=self._engine,
            group=self._group,
            rank=rank,
            exchange=self._exchange,
            options=PullOptions(
                mode=job.mode, control_timeout_s=_CONTROL_S, failed_read_hold_s=_HOLD_S
            ),
            stats=self._stats,
        )
        self._remote = parse_remote_prefill(job.params)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(_PRODUCER_RANKS)
        self._raw = self._plan_raw() if len(cards) == 1 else []

    def pull(self) -> None:
        """One pull by the connector's puller."""
        self._puller.submit(
            PullRequest(
                request_id=f"bench{next(self._numbers)}",
                remote=self._remote,
                local_block_ids=self._job.local_block_ids,
                first_token=0,
                end_token=self._job.setting.tokens,
            )
        )
        while not (results := self._puller.take_results()):
            time.sleep(_POLL_S)
        if not results[0].succeeded:
            raise PeerError("a pull of the benchmark failed; the log says why")

    def read_raw(self) -> None:
        """The same pieces by Mooncake alone, from all producer ranks at once."""
        list(self._threads.map(lambda reads: self._engine.read(*reads), self._raw))

    def check(self) -> None:
        """Compare all bytes with the producer's, then forget them.

        Raises:
            KvppError: they differ.
        """
        ours = torch.tensor(self._job.local_block_ids)
        for layer, cache in enumerate(self._caches.values()):
            expected = _contents(layer, self._job.remote_block_ids)
            if not torch.equal(cache[ours].flatten(1), expected):
                raise KvppError(f"layer {layer} was pulled wrong")
            cache.zero_()

    def counted(self) -> tuple[float, float, float]:
        """Bytes from the producer, bytes from peers, and pieces of all pulls."""
        sums = self._stats.take()
        return sums["pull_bytes"], sums.get("pull_peer_bytes", 0.0), sums["pull_pieces"]

    def close(self) -> None:
        """Stop all threads."""
        self._puller.close()
        self._exchange.close()
        self._threads.shutdown()

    def _plan_raw(self) -> list[tuple[str, list[int], list[int], list[int]]]:
        with ControlClient(self._remote.host, self._remote.port, _CONTROL_S) as client:
            manifest, route = ProducerLink(client, self._group, 0, "direct").route(self._remote)
        tokens = TokenRange(
            first=0,
            end=self._job.setting.tokens,
            local_block_ids=self._job.local_block_ids,
            remote_block_ids=self._remote.block_ids,
        )
        shard = self._group.ranks[0].shard
        reads = plan_reads(
            route.from_producer, tokens, local=self._group, remote=manifest, shard=shard
        )
        return [
            (
                read.session,
                read.local_addresses.tolist(),
                read.remote_addresses.tolist(),
                read.lengths_bytes.tolist(),
            )
            for read in reads
        ]


def _summed(values: tuple[float, ...]) -> list[float]:
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()
