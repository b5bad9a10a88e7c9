"""Scheduler side of a decode node: decides what to pull, and gives leases back."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2.metadata import (
    PullRequest,
    RemotePrefill,
    parse_remote_prefill,
    prompt_digest,
)
from kvpp_connect.connectors.mooncake_v2.quarantine import BlockQuarantine
from kvpp_connect.errors import PeerError

logger = get_logger(__name__)


class Leases(Protocol):
    """The producers' leases, as far as this node looks after them. Both return at once."""

    def keep(self, remote: RemotePrefill) -> None:
        """Renew a lease until it is released."""
        ...

    def release(self, remote: RemotePrefill, delay_s: float = 0.0) -> None:
        """Give a lease back, after a delay for which it is still renewed."""
        ...


class Stage(Enum):
    """Where a request's hand-over stands on the decode node."""

    OFFERED = "offered"
    PULLING = "pulling"
    SETTLED = "settled"


@dataclass(slots=True)
class _State:
    # None where the hand-over cannot be used: the prompt is computed here instead.
    remote: RemotePrefill | None
    stage: Stage
    # The client gave up while workers were pulling.
    finished: bool = False
    # Blocks that the pull writes.
    block_ids: tuple[int, ...] = ()
    # Monotonic seconds until which a given-up read may still write them, from the lease's blocks.
    written_until: float = 0.0


class Consumer:
    """One entry per request that arrived with a hand-over, until it is finished and settled."""

    def __init__(self, releaser: Leases, quarantine: BlockQuarantine) -> None:
        self._releaser = releaser
        self._quarantine = quarantine
        self._states: dict[str, _State] = {}
        self._new_pulls: list[PullRequest] = []
        self._new_cancels: set[str] = set()

    def arrived(self, request_id: str, params: Mapping[str, Any], prompt: Sequence[int]) -> None:
        """A request with a hand-over was queued: keep its lease, however long it waits."""
        if request_id not in self._states:
            self._open(request_id, params, prompt)

    def offered_tokens(
        self,
        request_id: str,
        params: Mapping[str, Any],
        prompt: Sequence[int],
        computed_tokens: int,
    ) -> int:
        """Prompt tokens beyond ``computed_tokens`` that can be pulled; may be asked repeatedly."""
        state = self._states.get(request_id)
        if state is None:
            state = self._open(request_id, params, prompt)
        if state.stage is not Stage.OFFERED or state.remote is None:
            return 0
        return max(0, state.remote.prompt_tokens - computed_tokens)

    def allocated(
        self, request_id: str, block_ids: Sequence[int], computed_tokens: int, tokens: int
    ) -> None:
        """The request has blocks for ``tokens`` tokens to pull from ``computed_tokens`` on."""
        state = self._states.get(request_id)
        if state is None or state.stage is not Stage.OFFERED or state.remote is None:
            return
        if tokens == 0:
            self._settle(state)
            return
        state.stage = Stage.PULLING
        state.block_ids = tuple(block_ids)
        self._new_pulls.append(
            PullRequest(
                request_id=request_id,
                remote=state.remote,
                local_block_ids=state.block_ids,
                first_token=computed_tokens,
                end_token=computed_tokens + tokens,
            )
        )

    def take_pulls(self) -> tuple[PullRequest, ...]:
        """Pulls for the workers, each once."""
        pulls, self._new_pulls = tuple(self._new_pulls), []
        return pulls

    def take_cancelled(self) -> frozenset[str]:
        """Requests that ended while workers pull them, each once."""
        cancelled, self._new_cancels = frozenset(self._new_cancels), set()
        return cancelled

    def still_written(self, seconds: Mapping[str, float]) -> None:
        """Reads of these requests were given up and repeated; they may write for that long.

        Told by each worker when its own pull ends, so before ``received``.
        """
        for request_id, left_s in seconds.items():
            state = self._states.get(request_id)
            if state is not None:
                self._quarantine.hold(state.block_ids, left_s)
                state.written_until = max(state.written_until, time.monotonic() + left_s)

    def received(self, request_ids: Iterable[str]) -> None:
        """All workers are done with these requests' pulls, well or badly."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None or state.stage is not Stage.PULLING:
                continue
            self._settle(state)
            self._new_cancels.discard(request_id)
            if state.finished:
                del self._states[request_id]

    def finished(self, request_id: str, params: Mapping[str, Any], prompt: Sequence[int]) -> None:
        """The request is over: generated to its end, aborted, or refused."""
        state = self._states.get(request_id) or self._open(request_id, params, prompt)
        if state.stage is Stage.PULLING:
            # Workers still write its blocks; ``received`` settles it.
            if not state.finished:
                state.finished = True
                self._new_cancels.add(request_id)
            return
        self._settle(state)
        del self._states[request_id]

    def _open(self, request_id: str, params: Mapping[str, Any], prompt: Sequence[int]) -> _State:
        try:
            remote = parse_remote_prefill(params)
        except PeerError as error:
            logger.warning("request %s: %s; computing its prompt here", request_id, error)
            state = _State(None, Stage.SETTLED)
        else:
            state = _State(remote, Stage.OFFERED)
            if remote.prompt_tokens != len(prompt) or remote.prompt_digest != prompt_digest(prompt):
                logger.warning(
                    "request %s: the prompt of %d tokens is not the one of %d tokens that engine "
                    "%s has computed; computing it here",
                    request_id,
                    len(prompt),
                    remote.prompt_tokens,
                    remote.engine_id,
                )
                self._settle(state)
            else:
                self._releaser.keep(remote)
        self._states[request_id] = state
        return state

    def _settle(self, state: _State) -> None:
        if state.stage is not Stage.SETTLED and state.remote is not None:
            self._releaser.release(state.remote, delay_s=state.written_until - time.monotonic())
        state.stage = Stage.SETTLED
