"""Running `kvpp demo multi`: the same requests to plain vLLM, then three times to all nodes."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.client import Completion, CompletionClient
from kvpp_connect.demo.fleet import Fleet, RunningServer
from kvpp_connect.demo.multi_report import Phase
from kvpp_connect.demo.multi_servers import MultiServers
from kvpp_connect.demo.pool_rows import BLOCK_TOKENS, ExpectedPool
from kvpp_connect.demo.pool_servers import PoolServers
from kvpp_connect.demo.process import Launch
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.runner import Deadline
from kvpp_connect.demo.servers import MODEL_NAME
from kvpp_connect.demo.workload import MAX_TOKENS
from kvpp_connect.errors import PeerError

_HIT = "vllm:kvpp_pool_hit_tokens_total"
_STORED = "vllm:kvpp_pool_stored_blocks_total"
_UNSTORED = "vllm:kvpp_pool_unstored_blocks_total"
_PULLED = "vllm:kvpp_pull_tokens_total"
_USAGE = "vllm:kv_cache_usage_perc"
_COUNTERS = (_HIT, _STORED, _UNSTORED, _PULLED)
_REQUEST_LIMIT_S = 120.0
_SETTLE_POLL_S = 0.3
_SETTLE_LIMIT_S = 30.0
_ANSWERS_IN_A_ROW = 4  # of nodes that take turns
_SHORT = "READY"  # fills no block
_CUT = "tp2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiRunner:
    """What all phases share."""

    servers: MultiServers
    pool: PoolServers
    prompts: Sequence[str]
    log_dir: Path
    deadline: Deadline
    console: Console  # for progress
    expected: ExpectedPool = field(default_factory=ExpectedPool)

    def phases(self) -> Generator[Phase]:
        """One phase after the other, so that an error leaves those before it.

        Raises:
            KvppError: a server failed, a request failed, or the time is up.
        """
        with Fleet(self.log_dir) as fleet:
            [plain] = self._start(fleet, self.servers.plain.launch())
            answers, seconds = self._send(plain, fleet)
            yield Phase(
                name="plain",
                title="plain vLLM, TP=1",
                tokens=tuple(answer.token_ids for answer in answers),
                prompt_tokens=sum(answer.prompt_tokens for answer in answers),
                requests_s=seconds,
                pool_hit_tokens={},
            )
        with Fleet(self.log_dir) as fleet:
            yield from self._group_phases(fleet)

    def _group_phases(self, fleet: Fleet) -> Iterator[Phase]:
        for launch in (self.pool.master(), self.pool.node()):
            self._start(fleet, launch)
        engines = self._start(fleet, *(server.launch() for server in self.servers.engines))
        nodes = {server.name: server for server in engines}
        [router] = self._start(fleet, self.servers.router.launch())
        yield self._phase("first", "P1 and P2 in turn, to D", router, nodes, fleet)
        # An odd number of requests: in the next round each goes to the other node.
        yield self._phase("again", "again, each on the other P", router, nodes, fleet)
        nodes.pop(self.servers.first.name).process.kill(gently=False)
        self._wait_for_the_rest(router)
        yield self._phase("killed", "P1 killed: all on P2", router, nodes, None)

    def _start(self, fleet: Fleet, *launches: Launch) -> tuple[RunningServer, ...]:
        with show_progress(self.console) as show:
            limit_s = self.deadline.remaining_s()
            return fleet.start(launches, timeout_s=limit_s, progress=show)

    def _phase(
        self,
        name: str,
        title: str,
        router: RunningServer,
        nodes: Mapping[str, RunningServer],
        fleet: Fleet | None,
    ) -> Phase:
        before = {node: _counters(server) for node, server in nodes.items()}
        hits = [self.expected.hit_tokens(_CUT, prompt) for prompt in self.prompts]
        answers, seconds = self._send(router, fleet)
        for prompt in self.prompts:
            self.expected.add(_CUT, prompt)
        stored = sum(
            (len(prompt) - hit) // BLOCK_TOKENS
            for prompt, hit in zip(self.prompts, hits, strict=True)
        )
        prefills = [node for node in nodes if node != self.servers.decode.name]
        gained, held = self._settle(nodes, before, prefills, stored)
        return Phase(
            name=name,
            title=title,
            tokens=tuple(answer.token_ids for answer in answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            requests_s=seconds,
            pool_hit_tokens={node: gained[node][_HIT] for node in prefills},
            expected_hit_tokens=sum(hits),
            pulled_tokens=gained[self.servers.decode.name][_PULLED],
            held_blocks=held,
        )

    def _send(
        self, entry: RunningServer, fleet: Fleet | None
    ) -> tuple[tuple[Completion, ...], float]:
        """Send all requests, one at a time, so that nodes take turns; answers and seconds."""
        begin = time.monotonic()
        limit_s = min(_REQUEST_LIMIT_S, self.deadline.remaining_s())
        client = CompletionClient(url=entry.url, model=MODEL_NAME, timeout_s=limit_s)
        try:
            with self.console.status(f"  {len(self.prompts)} requests to {entry.name}"):
                answers = client.complete_all(self.prompts, max_tokens=MAX_TOKENS, concurrency=1)
        except PeerError as error:
            if fleet is None:
                raise
            raise fleet.explain(str(error), suspect=entry) from error
        return answers, time.monotonic() - begin

    def _settle(
        self,
        nodes: Mapping[str, RunningServer],
        before: Mapping[str, Mapping[str, float]],
        prefills: Sequence[str],
        stored: int,
    ) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
        """Wait until so many blocks are stored and none is held.

        Returns:
            What the counters gained, by node, and the nodes that hold blocks all the same.
        """
        limit = time.monotonic() + min(_SETTLE_LIMIT_S, self.deadline.remaining_s())
        while True:
            now = {node: _counters(server) for node, server in nodes.items()}
            gained = {
                node: {name: int(now[node][name] - before[node][name]) for name in _COUNTERS}
                for node in nodes
            }
            held = tuple(node for node in nodes if now[node][_USAGE] > 0)
            through = sum(gained[node][_STORED] + gained[node][_UNSTORED] for node in prefills)
            if time.monotonic() > limit or (through >= stored and not held):
                return gained, held
            time.sleep(_SETTLE_POLL_S)

    def _wait_for_the_rest(self, router: RunningServer) -> None:
        """Return when the router asks the dead node no more."""
        client = CompletionClient(url=router.url, model=MODEL_NAME, timeout_s=_REQUEST_LIMIT_S)
        answered = 0
        while answered < _ANSWERS_IN_A_ROW:
            self.deadline.remaining_s()
            try:
                client.complete(_SHORT, max_tokens=1)
                answered += 1
            except PeerError:
                answered = 0
                time.sleep(_SETTLE_POLL_S)


def _counters(server: RunningServer) -> dict[str, float]:
    """Values of all counters; one that never moved may be absent."""
    names = (*_COUNTERS, _USAGE)
    client = CompletionClient(url=server.url, model=MODEL_NAME)
    return dict.fromkeys(names, 0.0) | client.counters(names)
