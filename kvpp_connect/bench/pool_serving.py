"""Time to the first token of a long prompt that is in the pool, beside computing it.

Real vLLM servers, one after the other: plain vLLM, one with KVPP that fills the pool, and a fresh
one with KVPP that finds everything there. The model is small, since there is a CPU only; with a
large model computing takes longer, and so does moving its KV.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvpp_connect.bench.rounds import Spread, spread
from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet, RunningServer
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.pool_servers import POOL_PORTS_NEEDED, PoolServers
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.servers import MODEL_NAME, VllmServer
from kvpp_connect.errors import KvppError, PeerError

_START_LIMIT_S = 400.0
_REQUEST_LIMIT_S = 300.0
_SETTLE_LIMIT_S = 60.0
_SETTLE_POLL_S = 0.2
_BLOCK_TOKENS = 16
_VOCABULARY, _FIRST_TOKEN = 500, 5
_LAYERS = 6
_STORED = "vllm:kvpp_pool_stored_blocks_total"
_HIT_TOKENS = "vllm:kvpp_pool_hit_tokens_total"
_SERVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetting:
    """Prompts of so many tokens, each another one; 0: no servers are started."""

    prompts: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrefix:
    """One server.

    Attributes:
        seconds: from the request to its answer of one token, one request at a time.
        hit_tokens: of each prompt, that came from the pool.
        plain_ratio: median over plain vLLM's.
        identical: answers that are plain vLLM's, of ``answers``.
    """

    name: str
    title: str
    prompt_tokens: int
    hit_tokens: int
    answers: int
    identical: int
    seconds: Spread
    plain_ratio: float


@dataclass(frozen=True, slots=True)
class _Answers:
    tokens: list[tuple[int, ...]]
    seconds: Spread
    hit_tokens: int


def measure_warm_prefixes(setting: ServingSetting, console: Console) -> tuple[WarmPrefix, ...]:
    """Start the servers one after the other; the first is plain vLLM.

    Raises:
        KvppError: a server failed, or blocks did not get into the pool.
    """
    prompts = _prompts(setting)
    spec = ModelSpec(layers=_LAYERS, max_tokens=2 * setting.prompt_tokens)
    ports = free_ports(POOL_PORTS_NEEDED + _SERVERS)
    kv_bytes = len(prompts) * setting.prompt_tokens * spec.kv_bytes_per_token
    pool = PoolServers(ports=ports[:POOL_PORTS_NEEDED], segment_bytes=2 * kv_bytes + (64 << 20))
    rows: list[WarmPrefix] = []
    first: _Answers | None = None
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        model = write_checkpoint(Path(folder) / "model", spec)
        with Fleet(Path(folder) / "logs") as fleet:
            for launch in (pool.master(), pool.node()):
                fleet.start([launch], timeout_s=_START_LIMIT_S)
            for port, (name, title) in zip(ports[POOL_PORTS_NEEDED:], _ROWS, strict=True):
                server = _server(name, port, model, spec, setting, pool)
                answers = _measure(server, prompts, Path(folder) / "logs", console)
                fleet.check()
                first = first or answers
                rows.append(_row(name, title, answers, first, setting))
    return tuple(rows)


_ROWS = (
    ("plain", "plain vLLM, TP=2: computes"),
    ("fill", "KVPP with an empty pool, TP=2: computes and stores"),
    ("hit", "KVPP with a warm pool, TP=2: loads"),
)


def _server(
    name: str,
    port: int,
    model: Path,
    spec: ModelSpec,
    setting: ServingSetting,
    pool: PoolServers,
) -> VllmServer:
    pooled = name != "plain"
    return VllmServer(
        name=name,
        model=model,
        port=port,
        tensor_parallel_size=2,
        # Several prompts: no more than a quarter of all blocks waits to be stored.
        kv_cache_bytes=6 * setting.prompt_tokens * spec.kv_bytes_per_token,
        max_model_tokens=setting.prompt_tokens + _BLOCK_TOKENS,
        max_requests=1,
        additional_config={"enable_kvpp": True} if pooled else None,
        kv_transfer_config=pool.kv_transfer_config() if pooled else None,
    )


def _measure(
    server: VllmServer, prompts: Sequence[tuple[int, ...]], logs: Path, console: Console
) -> _Answers:
    with Fleet(logs) as fleet:
        with show_progress(console) as progress:
            [running] = fleet.start([server.launch()], timeout_s=_START_LIMIT_S, progress=progress)
        client = CompletionClient(url=running.url, model=MODEL_NAME, timeout_s=_REQUEST_LIMIT_S)
        try:
            answers = [client.complete(prompt, max_tokens=1) for prompt in prompts]
        except PeerError as error:
            raise fleet.explain(str(error), suspect=running) from error
        if server.name == "fill":
            blocks = sum(len(prompt) // _BLOCK_TOKENS for prompt in prompts)
            _wait_until_stored(client, blocks, running)
        hit = client.counters([_HIT_TOKENS]).get(_HIT_TOKENS, 0)
    measured = answers[1:]  # first use is slow
    return _Answers(
        tokens=[answer.token_ids for answer in measured],
        seconds=spread([answer.seconds for answer in measured]),
        hit_tokens=int(hit / len(prompts)),
    )


def _wait_until_stored(client: CompletionClient, blocks: int, server: RunningServer) -> None:
    limit = time.monotonic() + _SETTLE_LIMIT_S
    while (stored := client.counters([_STORED]).get(_STORED, 0)) < blocks:
        if time.monotonic() > limit:
            raise KvppError(f"{server.name} stored {stored:.0f} of {blocks} blocks")
        time.sleep(_SETTLE_POLL_S)


def _row(
    name: str, title: str, answers: _Answers, plain: _Answers, setting: ServingSetting
) -> WarmPrefix:
    return WarmPrefix(
        name=name,
        title=title,
        prompt_tokens=setting.prompt_tokens,
        hit_tokens=answers.hit_tokens,
        answers=len(answers.tokens),
        identical=sum(a == b for a, b in zip(answers.tokens, plain.tokens, strict=True)),
        seconds=answers.seconds,
        plain_ratio=answers.seconds.median_s / plain.seconds.median_s,
    )


def _prompts(setting: ServingSetting) -> list[tuple[int, ...]]:
    """One more than asked for, as the first is not measured."""
    rng = random.Random(0)
    return [
        tuple(rng.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(setting.prompt_tokens))
        for _ in range(setting.prompts + 1)
    ]
