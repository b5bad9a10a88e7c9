"""Blocks that the pool's ranks still copy from, and what became of them: the scheduler's books.

A job's blocks are pinned in vLLM's block pool from the step that orders it until every rank has
copied its part, whatever becomes of their request: finished, aborted or preempted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpp_connect.connectors.ascend_store.orders import BlockList, PutOrder, PutReport
from kvpp_connect.connectors.pins import BlockPins


@dataclass(slots=True)
class _Job:
    blocks: BlockList
    report: PutReport = field(default_factory=PutReport)
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class EndedPut:
    """A job through which all ranks are. ``stored`` blocks are in the pool as a whole."""

    job: int
    stored: tuple[bytes, ...]
    failed: tuple[bytes, ...]


class PutLedger:
    """All put jobs that are not through. Driven by the scheduler's thread."""

    def __init__(self, world_size: int) -> None:
        """Args: world_size: ranks of the engine; each reports every job."""
        self._world_size = world_size
        self._jobs: dict[int, _Job] = {}
        self.next_job = 0
        self._pins: BlockPins | None = None
        self.pinned_blocks = 0

    def bind(self, pins: BlockPins) -> None:
        """Take the pool, once the scheduler has made it."""
        self._pins = pins

    def __len__(self) -> int:
        return len(self._jobs)

    def open(self, blocks: BlockList) -> PutOrder:
        """Pin a job's blocks and number it."""
        assert self._pins is not None, "vLLM binds the block pool before the first request"
        self._pins.pin(blocks.block_ids)
        self.pinned_blocks += len(blocks)
        job, self.next_job = self.next_job, self.next_job + 1
        self._jobs[job] = _Job(blocks)
        return PutOrder(job=job, blocks=blocks)

    def drop(self, job: int) -> None:
        """Forget a job that no rank was told of."""
        self._unpin(self._jobs.pop(job))

    def take_in(self, reports: Mapping[int, PutReport]) -> list[EndedPut]:
        """Take in what ranks say; answer the jobs that are through with it."""
        ended: list[EndedPut] = []
        for number, report in reports.items():
            job = self._jobs[number]
            job.report.add(report)
            if job.report.copied == self._world_size:
                self._unpin(job)
            if job.report.ended == self._world_size:
                self._unpin(job)
                del self._jobs[number]
                ended.append(_ended(number, job))
        return ended

    def _unpin(self, job: _Job) -> None:
        if not job.pinned:
            return
        assert self._pins is not None, "blocks were pinned"
        job.pinned = False
        self.pinned_blocks -= len(job.blocks)
        self._pins.unpin(job.blocks.block_ids)


def _ended(number: int, job: _Job) -> EndedPut:
    failed = job.report.failed
    return EndedPut(
        job=number,
        stored=tuple(h for i, h in enumerate(job.blocks.hashes) if i not in failed),
        failed=tuple(h for i, h in enumerate(job.blocks.hashes) if i in failed),
    )
