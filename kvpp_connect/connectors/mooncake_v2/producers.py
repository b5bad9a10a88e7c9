"""What a decode rank keeps of one producer: its control channel, its manifest, the route."""

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.routes import (
    PullMode,
    Route,
    check_compatible,
    plan_routes,
)
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import EngineManifest, GroupManifest


class LeaseLostError(PeerError):
    """The producer no longer keeps the blocks for us."""


class ProducerRestartedError(PeerError):
    """The producer is not the one that computed the prompt."""


class IncompatibleError(PeerError):
    """The producer's caches cannot be copied into ours."""


class ProducerLink:
    """One producer as one rank of a decode group sees it."""

    def __init__(
        self, client: ControlClient, group: GroupManifest, rank: int, mode: PullMode
    ) -> None:
        self._client = client
        self._group = group
        self._rank = rank
        self._mode: PullMode = mode
        self._known: tuple[EngineManifest, Route] | None = None

    def route(self, remote: RemotePrefill) -> tuple[EngineManifest, Route]:
        """The layout of the incarnation that handed a request over, and the way to read it.

        Raises:
            PeerError: there is no answer, or not from that incarnation, or its caches differ.
        """
        wanted = remote.lease.incarnation
        if self._known is None or self._known[0].incarnation != wanted:
            answer = self._client.ask(wire.GetManifest())
            if not isinstance(answer, wire.ManifestAnswer):
                raise PeerError(f"asked for a manifest, got {type(answer).__name__}")
            if answer.manifest.incarnation != wanted:
                raise ProducerRestartedError(
                    "the prefill engine was restarted since it computed this prompt"
                )
            self._known = answer.manifest, self._plan(answer.manifest)
        return self._known

    def confirm(self, remote: RemotePrefill, for_s: float = 0.0) -> None:
        """Make sure that what was read was not overwritten, and will not be for a while.

        Args:
            for_s: seconds for which a read that was given up may still copy the blocks.

        Raises:
            PeerError: the lease is over or too short, or there is no answer.
        """
        answer = self._client.ask(wire.Confirm(remote.lease))
        left_s = answer.left_s if isinstance(answer, wire.LeaseAnswer) else 0.0
        state = answer.state if isinstance(answer, wire.LeaseAnswer) else None
        if state is not wire.LeaseState.HELD:
            raise LeaseLostError(
                f"the lease is {state.value if state else 'unclear'} after the read, the blocks "
                "may have been overwritten; raise lease_s on the prefill node if this happens often"
            )
        if left_s < for_s:
            raise LeaseLostError(
                f"the lease holds for {left_s:.1f} s, a read that was given up may go on for "
                f"{for_s:.1f} s; make lease_s on the prefill node longer than failed_read_hold_s"
            )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _plan(self, manifest: EngineManifest) -> Route:
        try:
            check_compatible(manifest, self._group)
            return plan_routes(manifest, self._group, self._mode)[self._rank]
        except PeerError as error:
            raise IncompatibleError(str(error)) from error
