"""Requests through the OpenAI completions API, and counters from /metrics."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvpp_connect.demo.local_http import get_text, post_json
from kvpp_connect.errors import PeerError

_METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The greedy continuation of one prompt."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionClient:
    """One OpenAI endpoint: a vLLM server, or a router in front of some."""

    url: str  # without a slash at the end
    model: str
    timeout_s: float = 120.0  # per request

    def complete(self, prompt: str | Sequence[int], *, max_tokens: int) -> Completion:
        """Continue a prompt, given as text or token ids, by exactly `max_tokens` greedy tokens.

        Raises:
            PeerError: no answer, an error, or another number of tokens.
        """
        begin = time.monotonic()
        answer = post_json(
            f"{self.url}/v1/completions",
            {
                "model": self.model,
                "prompt": prompt if isinstance(prompt, str) else list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout_s=self.timeout_s,
        )
        try:
            token_ids = tuple(answer["choices"][0]["token_ids"])
            prompt_tokens = int(answer["usage"]["prompt_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise PeerError(f"{self.url} answered without token ids: {answer!r:.500}") from error
        if len(token_ids) != max_tokens:
            raise PeerError(f"{self.url} answered {len(token_ids)} tokens, expected {max_tokens}")
        seconds = time.monotonic() - begin
        return Completion(token_ids=token_ids, prompt_tokens=prompt_tokens, seconds=seconds)

    def complete_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int,
        concurrency: int,
        done: Callable[[], None] = lambda: None,
    ) -> tuple[Completion, ...]:
        """Continue several prompts, `concurrency` at a time; answers in the order of the prompts.

        The first failure is raised without waiting for the requests that still run.
        `done` is called in the calling thread after each answer.
        """
        pool = ThreadPoolExecutor(concurrency)
        try:
            futures = [pool.submit(self.complete, p, max_tokens=max_tokens) for p in prompts]
            answers = []
            for future in futures:
                answers.append(future.result())
                done()
            return tuple(answers)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def counters(self, names: Sequence[str]) -> dict[str, float]:
        """Current values of Prometheus counters, summed over their labels; without absent ones.

        Raises:
            PeerError: no answer.
        """
        text = get_text(f"{self.url}/metrics", timeout_s=_METRICS_TIMEOUT_S)
        values = {name: sum_samples(text, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def sum_samples(text: str, name: str) -> float | None:
    """Sum of the samples called `name` in a Prometheus text, over all label sets."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, samples)) if samples else None
