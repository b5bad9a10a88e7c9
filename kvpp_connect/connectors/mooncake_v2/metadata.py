"""Documents between the nodes' requests and between scheduler and workers.

``kv_transfer_params`` is what a request carries from the prefill to the decode node, through the
router and in JSON: the existing convention's flat keys, and one nested object of ours.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef
from kvpp_connect.errors import PeerError

OUR_KEY = "kvpp_connect"


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What the convention has no key for.

    ``prompt_digest`` lets the decode node notice that its prompt is another one, which would make
    every pulled byte wrong. ``lease_s`` is the time within which it must renew the lease.
    """

    incarnation: str
    generation: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
    prompt_tokens: int
    prompt_digest: str


class _RemoteParams(msgspec.Struct, frozen=True, kw_only=True):
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_request_id: str
    remote_block_ids: list[int]
    kvpp_connect: Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """A request's KV on a prefill node, as its decode node knows it."""

    engine_id: str
    host: str
    port: int
    lease: LeaseRef
    lease_s: float
    block_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_digest: str


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Fingerprint of a prompt (first 16 hex digits of sha256 over 64-bit little-endian ids)."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:16]


def handover_params(
    *,
    engine_id: str,
    host: str,
    port: int,
    lease: LeaseRef,
    lease_s: float,
    block_ids: Sequence[int],
    prompt: Sequence[int],
) -> dict[str, Any]:
    """Build the ``kv_transfer_params`` of a prefill node's response."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": lease.request_id,
        "remote_block_ids": list(block_ids),
        OUR_KEY: msgspec.to_builtins(
            Handover(
                incarnation=lease.incarnation,
                generation=lease.generation,
                lease_s=lease_s,
                prompt_tokens=len(prompt),
                prompt_digest=prompt_digest(prompt),
            )
        ),
    }


def parse_remote_prefill(params: Mapping[str, Any]) -> RemotePrefill:
    """Read a decode request's ``kv_transfer_params``.

    Raises:
        PeerError: a key is missing or has the wrong type; names it.
    """
    try:
        remote = msgspec.convert(params, _RemoteParams)
    except msgspec.ValidationError as error:
        raise PeerError(f"kv_transfer_params: {error}") from error
    ours = remote.kvpp_connect
    return RemotePrefill(
        engine_id=remote.remote_engine_id,
        host=remote.remote_host,
        port=remote.remote_port,
        lease=LeaseRef(
            incarnation=ours.incarnation,
            request_id=remote.remote_request_id,
            generation=ours.generation,
        ),
        lease_s=ours.lease_s,
        block_ids=tuple(remote.remote_block_ids),
        prompt_tokens=ours.prompt_tokens,
        prompt_digest=ours.prompt_digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """One request's pull, for every worker of the decode node.

    Tokens ``[first_token, end_token)`` are wanted; ``local_block_ids`` begin at token 0.
    """

    request_id: str
    remote: RemotePrefill
    local_block_ids: tuple[int, ...]
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """What the scheduler side tells the workers in one step.

    ``cancelled`` are requests whose pull nobody wants any more; it ends as a failure, or has ended.
    ``ended_leases`` are finished requests whose blocks the workers report as sent, which is how
    vLLM learns that it may free them.
    """

    pulls: tuple[PullRequest, ...] = ()
    cancelled: frozenset[str] = field(default_factory=frozenset[str])
    ended_leases: frozenset[str] = field(default_factory=frozenset[str])
