"""Running one row of the demo: start its servers, send the requests, read the counters, stop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.client import Completion, CompletionClient
from kvpp_connect.demo.fleet import Fleet, RunningServer
from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.report import PullCounters, RowMeasurement
from kvpp_connect.demo.rows import RowPlan
from kvpp_connect.demo.servers import MODEL_NAME
from kvpp_connect.demo.workload import CONCURRENCY, MAX_TOKENS, Wave
from kvpp_connect.errors import KvppError, PeerError

PULL_BYTES = "vllm:kvpp_pull_bytes_total"
PULL_TOKENS = "vllm:kvpp_pull_tokens_total"
_REQUEST_LIMIT_S = 120.0
_SETTLE_POLL_S = 0.3
_SETTLE_LIMIT_S = 5.0


class Deadline:
    """A point in time that everything shares."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def remaining_s(self) -> float:
        """Seconds left; raises KvppError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise KvppError(f"not finished after {self.limit_s:.0f} s: see --timeout")
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """What all rows share."""

    spec: ModelSpec
    waves: Sequence[Wave]
    log_dir: Path
    deadline: Deadline
    console: Console  # for progress

    def measure(self, plan: RowPlan) -> RowMeasurement:
        """Run one row and stop its servers.

        Raises:
            KvppError: a server failed, a request failed, or the time is up.
        """
        with Fleet(self.log_dir) as fleet:
            servers = self._start(plan, fleet)
            size = kv_cache_size(read_log(servers[plan.capacity_of].process.log_path))
            if size is None:
                raise servers[plan.capacity_of].process.error("logged no KV cache size")
            puller = servers[plan.puller] if plan.puller else None
            before = _pull_counters(puller) if puller else {}
            begin = time.monotonic()
            answers = self._send(servers[plan.entry], fleet, plan.title)
            requests_s = time.monotonic() - begin
            pull = self._pulled(puller, before) if puller else None
        return RowMeasurement(
            name=plan.name,
            title=plan.title,
            tokens=tuple(answer.token_ids for answer in answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            kv_cache_line=size.text,
            kv_cache_tokens=size.tokens,
            kvpp_ranks=plan.kvpp_ranks,
            scratch_share=plan.scratch_share(size.tokens),
            layers=self.spec.layers,
            startup_s=max(server.startup_s for server in servers.values()),
            requests_s=requests_s,
            pull=pull,
        )

    def _start(self, plan: RowPlan, fleet: Fleet) -> dict[str, RunningServer]:
        stages = [[server.launch() for server in plan.servers]]
        if plan.router:
            stages.append([plan.router.launch()])
        running: list[RunningServer] = []
        for launches in stages:
            with show_progress(self.console) as progress:
                running += fleet.start(
                    launches, timeout_s=self.deadline.remaining_s(), progress=progress
                )
        return {server.name: server for server in running}

    def _send(self, entry: RunningServer, fleet: Fleet, title: str) -> list[Completion]:
        answers: list[Completion] = []
        total = sum(len(wave.prompts) for wave in self.waves)
        with self.console.status(f"  {total} requests to {title}"):
            for wave in self.waves:
                timeout_s = min(_REQUEST_LIMIT_S, self.deadline.remaining_s())
                client = CompletionClient(url=entry.url, model=MODEL_NAME, timeout_s=timeout_s)
                try:
                    answers += client.complete_all(
                        wave.prompts, max_tokens=MAX_TOKENS, concurrency=CONCURRENCY
                    )
                except PeerError as error:
                    raise fleet.explain(str(error), suspect=entry) from error
        return answers

    def _pulled(self, puller: RunningServer, before: dict[str, float]) -> PullCounters:
        """What the puller's counters gained, once they have settled."""
        limit = time.monotonic() + _SETTLE_LIMIT_S
        after = _pull_counters(puller)
        while time.monotonic() < limit:
            time.sleep(_SETTLE_POLL_S)
            previous, after = after, _pull_counters(puller)
            if after == previous:
                break
        gained = {name: int(value - before.get(name, 0.0)) for name, value in after.items()}
        return PullCounters(
            pulled_bytes=gained.get(PULL_BYTES, 0),
            pulled_tokens=gained.get(PULL_TOKENS, 0),
            bytes_per_token=self.spec.kv_bytes_per_token,
        )


def _pull_counters(server: RunningServer) -> dict[str, float]:
    client = CompletionClient(url=server.url, model=MODEL_NAME)
    return client.counters((PULL_BYTES, PULL_TOKENS))
