"""Running one row of `kvpp demo pool`: start its server, send the requests, look into the pool."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.client import Completion, CompletionClient
from kvpp_connect.demo.fleet import Fleet, RunningServer
from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.pool_report import PoolContents, PoolRowMeasurement
from kvpp_connect.demo.pool_rows import BLOCK_TOKENS, ExpectedPool, PoolRowPlan
from kvpp_connect.demo.pool_servers import PoolServers
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.runner import Deadline
from kvpp_connect.demo.servers import MODEL_NAME
from kvpp_connect.demo.workload import MAX_TOKENS, Wave
from kvpp_connect.errors import PeerError

_HIT_TOKENS = "vllm:kvpp_pool_hit_tokens_total"
_STORED = "vllm:kvpp_pool_stored_blocks_total"
_UNSTORED = "vllm:kvpp_pool_unstored_blocks_total"
_COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
_FIRST_TOKEN_S = "vllm:time_to_first_token_seconds_sum"
_FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
_COUNTERS = (_HIT_TOKENS, _STORED, _UNSTORED, _COMPUTED, _FIRST_TOKEN_S, _FIRST_TOKENS)
_REQUEST_LIMIT_S = 120.0
_SETTLE_POLL_S = 0.2
_SETTLE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRunner:
    """What all rows share; they have to run in order.

    Attributes:
        expected: what the rows before have left in the pool.
        shards: objects of a block, by cut.
    """

    spec: ModelSpec
    waves: Sequence[Wave]
    pool: PoolServers
    log_dir: Path
    deadline: Deadline
    console: Console  # for progress
    expected: ExpectedPool = field(default_factory=ExpectedPool)
    shards: dict[str, int] = field(default_factory=dict)

    def measure(self, plan: PoolRowPlan) -> PoolRowMeasurement:
        """Run one row and stop its server.

        Raises:
            KvppError: the server failed, a request failed, or the time is up.
        """
        if plan.cut:
            self.shards[plan.cut] = plan.shards
        with Fleet(self.log_dir) as fleet:
            with show_progress(self.console) as progress:
                [server] = fleet.start(
                    [plan.server.launch()],
                    timeout_s=self.deadline.remaining_s(),
                    progress=progress,
                )
            begin = time.monotonic()
            answers, hit = self._send_all(plan, server, fleet)
            requests_s = time.monotonic() - begin
            counters = _counters(server)
        return PoolRowMeasurement(
            name=plan.name,
            title=plan.title,
            tokens=tuple(answer.token_ids for answer in answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            hit_tokens=int(counters[_HIT_TOKENS]),
            expected_hit_tokens=hit,
            computed_tokens=int(counters[_COMPUTED]),
            first_token_s=counters[_FIRST_TOKEN_S] / max(1.0, counters[_FIRST_TOKENS]),
            startup_s=server.startup_s,
            requests_s=requests_s,
            pool=self._contents() if plan.cut else None,
        )

    def _send_all(
        self, plan: PoolRowPlan, server: RunningServer, fleet: Fleet
    ) -> tuple[list[Completion], int]:
        """Send all waves; returns the answers, and the tokens that should come from the pool."""
        answers: list[Completion] = []
        hit = stored = 0
        total = sum(len(wave.prompts) for wave in self.waves)
        with self.console.status(f"  {total} requests to {plan.title}"):
            for wave in self.waves:
                found = self._send(wave, server, fleet)
                answers += found
                if not plan.cut:
                    continue
                for prompt, answer in zip(wave.prompts, found, strict=True):
                    hits = self.expected.hit_tokens(plan.cut, prompt)
                    # The last token of an answer is never computed.
                    computed = (*prompt, *answer.token_ids[:-1])
                    self.expected.add(plan.cut, computed)
                    hit += hits
                    stored += (len(computed) - hits) // BLOCK_TOKENS
                self._settle(server, stored)
        return answers, hit

    def _send(self, wave: Wave, server: RunningServer, fleet: Fleet) -> Sequence[Completion]:
        timeout_s = min(_REQUEST_LIMIT_S, self.deadline.remaining_s())
        client = CompletionClient(url=server.url, model=MODEL_NAME, timeout_s=timeout_s)
        try:
            # One at a time: times to the first token without waiting for each other.
            return client.complete_all(wave.prompts, max_tokens=MAX_TOKENS, concurrency=1)
        except PeerError as error:
            raise fleet.explain(str(error), suspect=server) from error

    def _settle(self, server: RunningServer, stored: int) -> None:
        """Wait until so many blocks are through; what is missing then shows in the figures."""
        limit = time.monotonic() + min(_SETTLE_LIMIT_S, self.deadline.remaining_s())
        while time.monotonic() < limit:
            counters = _counters(server)
            if counters[_STORED] + counters[_UNSTORED] >= stored:
                return
            time.sleep(_SETTLE_POLL_S)

    def _contents(self) -> PoolContents:
        blocks = {cut: self.expected.count(cut) for cut in self.shards}
        figures = self.pool.figures()
        block_bytes = BLOCK_TOKENS * self.spec.kv_bytes_per_token
        return PoolContents(
            objects=figures.objects,
            stored_bytes=figures.stored_bytes,
            expected_objects=sum(blocks[cut] * shards for cut, shards in self.shards.items()),
            logical_bytes=sum(blocks.values()) * block_bytes,
        )


def _counters(server: RunningServer) -> dict[str, float]:
    """Values of all counters; one that never moved may be absent."""
    client = CompletionClient(url=server.url, model=MODEL_NAME)
    return dict.fromkeys(_COUNTERS, 0.0) | client.counters(_COUNTERS)
