"""What the scheduler side tells the workers in a step, and what they tell it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpp_connect.connectors.ascend_store.shards import StageShards


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """Token blocks: the names under which the pool knows them, and where they lie here."""

    hashes: tuple[bytes, ...] = ()
    block_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Blocks of one request to load, the first ones first.

    ``in_step``: the coming forward reads them; else the request waits for them.
    """

    request_id: str
    blocks: BlockList
    in_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder:
    """Blocks to store after the coming forward. They stay as they are until all ranks have said
    that they copied them."""

    job: int
    blocks: BlockList


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOrders:
    """One step's orders, the same for all ranks.

    ``scope`` begins every key. ``cancelled`` are requests whose load nobody wants any more.
    """

    scope: str = ""
    loads: tuple[LoadOrder, ...] = ()
    puts: tuple[PutOrder, ...] = ()
    cancelled: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class PutReport:
    """What ranks say of one put job.

    ``copied`` ranks need its blocks no more; ``ended`` ranks are through with it. ``failed`` are
    the places in the order of blocks that some rank could not store.
    """

    copied: int = 0
    ended: int = 0
    failed: set[int] = field(default_factory=set[int])

    def add(self, other: "PutReport") -> None:
        """Take in what other ranks, or the same ones later, say."""
        self.copied += other.copied
        self.ended += other.ended
        self.failed |= other.failed


@dataclass(slots=True, kw_only=True)
class PoolReport:
    """What ranks tell the scheduler side; several of them in one.

    ``stages`` describe pipeline stages, told once at start. ``lost`` are blocks that were looked
    for and not there.
    """

    stages: list[StageShards] = field(default_factory=list[StageShards])
    puts: dict[int, PutReport] = field(default_factory=dict[int, PutReport])
    lost: set[bytes] = field(default_factory=set[bytes])

    def add(self, other: "PoolReport") -> None:
        """Take in another report."""
        self.stages += other.stages
        for job, report in other.puts.items():
            self.puts.setdefault(job, PutReport()).add(report)
        self.lost |= other.lost

    def __bool__(self) -> bool:
        return bool(self.stages or self.puts or self.lost)


def block_list(hashes: Sequence[bytes], block_ids: Sequence[int]) -> BlockList:
    """Pair names with places; both sequences have the same length."""
    assert len(hashes) == len(block_ids), "each block has one name and one place"
    return BlockList(hashes=tuple(hashes), block_ids=tuple(block_ids))
