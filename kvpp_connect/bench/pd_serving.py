"""Time to the first token of real servers: plain vLLM, and P/D through vllm-router.

vLLM's own MooncakeConnector, without KVPP, is started as well, to stand beside ours. Where it does
not start, as on a CPU, its row says why.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from kvpp_connect.bench.rounds import Spread, spread
from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet, RunningServer
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.rows import PORTS_NEEDED, RowPlan, plan_rows
from kvpp_connect.demo.servers import MODEL_NAME, VllmServer
from kvpp_connect.errors import KvppError, PeerError

PROMPT_TOKENS = 894
_START_LIMIT_S = 400.0
_REQUEST_LIMIT_S = 120.0
_KV_CACHE_BYTES = 100_000_000
_VOCABULARY, _FIRST_TOKEN = 500, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """One deployment.

    Attributes:
        seconds: from the request to its answer of one token, one request at a time.
        plain_ratio: median over plain vLLM's.
        identical: answers that are plain vLLM's, of ``answers``.
        problem: why there is no measurement.
    """

    name: str
    title: str
    answers: int = 0
    identical: int = 0
    seconds: Spread | None = None
    plain_ratio: float | None = None
    problem: str = ""


def measure_first_tokens(requests: int, console: Console) -> tuple[FirstToken, ...]:
    """Start the deployments one after the other; the first is plain vLLM.

    Args:
        requests: of each deployment, with prompts of ``PROMPT_TOKENS``.
        console: for progress.

    Raises:
        KvppError: a server other than vLLM's own connector's failed.
    """
    prompts = _prompts(requests + 1)
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        model = write_checkpoint(Path(folder) / "model", ModelSpec())
        rows = {
            row.name: row
            for row in plan_rows(model, free_ports(PORTS_NEEDED), kv_cache_bytes=_KV_CACHE_BYTES)
        }
        plain, first = _measure(rows["plain"], prompts, model, console)
        found = [replace(plain, plain_ratio=1.0)]
        for plan in (rows["pd"], _in_tree(rows["pd"])):
            try:
                row, tokens = _measure(plan, prompts, model, console)
            except KvppError as error:
                if plan is rows["pd"]:
                    raise
                found.append(FirstToken(name=plan.name, title=plan.title, problem=str(error)))
                continue
            found.append(_compare(row, tokens, plain, first))
    return tuple(found)


_Tokens = Sequence[tuple[int, ...]]


def _measure(
    plan: RowPlan, prompts: _Tokens, model: Path, console: Console
) -> tuple[FirstToken, _Tokens]:
    with Fleet(model.parent / "logs") as fleet:
        servers: dict[str, RunningServer] = {}
        for stage in (plan.servers, (plan.router,) if plan.router else ()):
            with show_progress(console) as progress:
                launches = [server.launch() for server in stage]
                started = fleet.start(launches, timeout_s=_START_LIMIT_S, progress=progress)
            servers |= {server.name: server for server in started}
        entry = servers[plan.entry]
        client = CompletionClient(url=entry.url, model=MODEL_NAME, timeout_s=_REQUEST_LIMIT_S)
        try:
            answers = [client.complete(prompt, max_tokens=1) for prompt in prompts]
        except PeerError as error:
            raise fleet.explain(str(error), suspect=entry) from error
    measured = answers[1:]  # first use is slow
    row = FirstToken(
        name=plan.name,
        title=plan.title,
        answers=len(measured),
        identical=len(measured),
        seconds=spread([answer.seconds for answer in measured]),
    )
    return row, [answer.token_ids for answer in measured]


def _compare(row: FirstToken, tokens: _Tokens, plain: FirstToken, first: _Tokens) -> FirstToken:
    assert row.seconds is not None, "a measured row has times"
    assert plain.seconds is not None, "a measured row has times"
    return replace(
        row,
        identical=sum(a == b for a, b in zip(tokens, first, strict=True)),
        plain_ratio=row.seconds.median_s / plain.seconds.median_s,
    )


def _in_tree(plan: RowPlan) -> RowPlan:
    """The same deployment with vLLM's own connector and without KVPP."""

    def change(server: object) -> VllmServer:
        assert isinstance(server, VllmServer), "a row's servers are vLLM's"
        transfer: Mapping[str, object] = server.kv_transfer_config or {}
        return replace(
            server,
            name=f"in-tree-{server.name}",
            additional_config=None,
            kv_transfer_config={
                "kv_connector": "MooncakeConnector",
                "kv_role": transfer["kv_role"],
            },
        )

    return replace(
        plan,
        name="in-tree",
        title="P/D: vLLM's MooncakeConnector, without KVPP",
        servers=tuple(change(server) for server in plan.servers),
    )


def _prompts(count: int) -> _Tokens:
    rng = random.Random(0)
    return [
        tuple(rng.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(PROMPT_TOKENS))
        for _ in range(count)
    ]
