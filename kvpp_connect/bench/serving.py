"""One workload on real servers: plain vLLM, KVPP in full mode, and in compact mode, side by side.

The servers run one after the other with the same memory, model and requests; the first is plain
vLLM, whose tokens the others have to give. Small models on CPUs: what is compared is what KVPP's
broadcasts and its scratch cost, not how fast a model is.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.servers import MODEL_NAME, VllmServer
from kvpp_connect.errors import ConfigError, PeerError

_PREEMPTIONS = "vllm:num_preemptions_total"
_START_LIMIT_S = 240.0
_FIRST_TOKEN, _VOCABULARY = 5, 500  # without the special tokens
_LEAST_PROMPT, _MOST_PROMPT = 114, 763  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What is run.

    Attributes:
        kv_cache_bytes: per rank.
        running_tokens: one server in compact mode for each; ``None`` is the default size.
        requests, concurrency: of one round.
        rounds: each with new prompts.
        request_limit_s: for one answer; where little runs at once, most of it is waiting.
    """

    ranks: int = 2
    layers: int = 6
    kv_cache_bytes: int = 400_000_000
    running_tokens: tuple[int | None, ...] = (None,)
    requests: int = 20
    concurrency: int = 16
    max_tokens: int = 40
    rounds: int = 2
    request_limit_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One server.

    Attributes:
        cached_tokens: what the KV cache holds, in vLLM's words.
        seconds: of each round.
        plain_ratio: time of all rounds over plain vLLM's.
        identical: answers that are plain vLLM's, of ``answers``.
    """

    name: str
    running_tokens: int | None
    cached_tokens: int
    seconds: tuple[float, ...]
    plain_ratio: float
    preemptions: int
    identical: int
    answers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """The whole result."""

    options: ServingOptions
    rows: tuple[ServingRow, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Servers whose tokens are not plain vLLM's."""
        return tuple(
            f"{row.name}: {row.answers - row.identical} of {row.answers} answers differ from plain"
            for row in self.rows
            if row.identical != row.answers
        )


@dataclass(frozen=True, slots=True)
class _Answers:
    tokens: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    preemptions: int
    cached_tokens: int


def make_rounds(options: ServingOptions, seed: int = 0) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Prompts of 114 to 763 tokens, for each round."""
    rng = random.Random(seed)

    def prompt() -> tuple[int, ...]:
        length = rng.randint(_LEAST_PROMPT, _MOST_PROMPT)
        return tuple(rng.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(length))

    return tuple(tuple(prompt() for _ in range(options.requests)) for _ in range(options.rounds))


def measure_serving(options: ServingOptions, console: Console) -> ServingReport:
    """Run all servers.

    Args:
        console: for progress.

    Raises:
        KvppError: a server or a request failed.
    """
    servers = _servers(options)
    rows: list[ServingRow] = []
    rounds = make_rounds(options)
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        model = write_checkpoint(Path(folder) / "model", ModelSpec(layers=options.layers))
        plain: _Answers | None = None
        for name, tokens, kvpp in servers:
            answers = _serve(options, model, name, kvpp, rounds, console)
            plain = plain or answers
            rows.append(_judge(name, tokens, answers, plain))
    return ServingReport(options=options, rows=tuple(rows))


def _servers(options: ServingOptions) -> list[tuple[str, int | None, dict[str, object] | None]]:
    """Name, running tokens and KVPP's options of each server; ``None``: KVPP is off."""
    servers: list[tuple[str, int | None, dict[str, object] | None]] = [
        ("plain", None, None),
        ("full", None, {"mode": "full"}),
    ]
    for tokens in options.running_tokens:
        kvpp: dict[str, object] = {"mode": "compact"}
        if tokens is not None:
            kvpp["running_tokens"] = tokens
        servers.append((f"compact-{tokens}" if tokens else "compact", tokens, kvpp))
    names = [name for name, _, _ in servers]
    if len(set(names)) != len(names):
        raise ConfigError(f"--running-tokens names a size twice: {', '.join(names[2:])}")
    return servers


def _serve(
    options: ServingOptions,
    model: Path,
    name: str,
    kvpp: dict[str, object] | None,
    rounds: Sequence[Sequence[Sequence[int]]],
    console: Console,
) -> _Answers:
    server = VllmServer(
        name=name,
        model=model,
        port=free_ports(1)[0],
        tensor_parallel_size=options.ranks,
        kv_cache_bytes=options.kv_cache_bytes,
        max_model_tokens=1024,
        max_requests=options.concurrency,
        additional_config=None if kvpp is None else {"enable_kvpp": True, "kvpp": kvpp},
    )
    with Fleet(model.parent / "logs") as fleet:
        with show_progress(console) as progress:
            (running,) = fleet.start([server.launch()], timeout_s=_START_LIMIT_S, progress=progress)
        client = CompletionClient(
            url=server.url, model=MODEL_NAME, timeout_s=options.request_limit_s
        )
        tokens: list[tuple[int, ...]] = []
        seconds: list[float] = []
        try:
            client.complete(rounds[0][0][:_LEAST_PROMPT], max_tokens=2)  # first use is slow
            for prompts in rounds:
                begin = time.monotonic()
                answers = client.complete_all(
                    prompts, max_tokens=options.max_tokens, concurrency=options.concurrency
                )
                seconds.append(round(time.monotonic() - begin, 3))
                tokens += [answer.token_ids for answer in answers]
            preemptions = int(client.counters([_PREEMPTIONS]).get(_PREEMPTIONS, 0))
        except PeerError as error:
            raise fleet.explain(str(error), suspect=running) from error
        size = kv_cache_size(read_log(running.process.log_path))
        if size is None:
            raise running.process.error("logged no KV cache size")
    return _Answers(tuple(tokens), tuple(seconds), preemptions, size.tokens)


def _judge(name: str, tokens: int | None, answers: _Answers, plain: _Answers) -> ServingRow:
    pairs = zip(answers.tokens, plain.tokens, strict=True)
    return ServingRow(
        name=name,
        running_tokens=tokens,
        cached_tokens=answers.cached_tokens,
        seconds=answers.seconds,
        plain_ratio=round(sum(answers.seconds) / sum(plain.seconds), 3),
        preemptions=answers.preemptions,
        identical=sum(mine == theirs for mine, theirs in pairs),
        answers=len(plain.tokens),
    )
