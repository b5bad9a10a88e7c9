"""What an owner collects for a broadcast: pages that lie apart, in the order of their travel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PageRun:
    """Some pages of one cache: ``pages`` of shape ``(blocks, page bytes)``, ``ids`` into them."""

    pages: torch.Tensor
    ids: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.ids) * self.pages.shape[1]

    def write_to(self, target: torch.Tensor) -> None:
        """Copy the pages one after the other to the beginning of ``target``, a byte tensor."""
        out = target[: self.size].view(len(self.ids), -1)
        torch.index_select(self.pages, 0, self.ids, out=out)


@dataclass(frozen=True, slots=True)
class PageGather:
    """The source of one broadcast, before it is collected: the same blocks of every cache.

    ``caches`` are bytes of shape ``(blocks, page bytes)`` each, ``ids`` of shape ``(active,)``.
    They do not change until the broadcast is over.
    """

    caches: Sequence[torch.Tensor]
    ids: torch.Tensor

    def into(self, target: torch.Tensor) -> None:
        """Collect everything in ``target``, a byte tensor that holds it exactly."""
        for pages in self.caches:
            run = PageRun(pages, self.ids)
            run.write_to(target)
            target = target[run.size :]

    def fits(self, run_bytes: int) -> bool:
        """Whether runs of so many bytes hold at least a page of each cache."""
        return all(pages.shape[1] <= run_bytes for pages in self.caches)

    def runs(self, run_bytes: int) -> Iterator[PageRun]:
        """All pages in order, in pieces of at most so many bytes, if they fit."""
        for pages in self.caches:
            for ids in self.ids.split(run_bytes // pages.shape[1]):
                yield PageRun(pages, ids)
