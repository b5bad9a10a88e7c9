"""Scheduler side of a prefill node: hands finished requests over and answers their readers."""

import uuid
from collections.abc import Sequence

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import DEFAULT_QUESTIONS_PER_S, ControlServer
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.metadata import handover_params
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import EngineManifest, GroupManifest

logger = get_logger(__name__)


class Producer:
    """Lease book and control channel of one engine.

    Args:
        host: address that readers are told.
        bind_host: local address of the control channel; empty: ``host``.
        lease_s: seconds without a renewal after which a hand-over's blocks are freed.
        max_lease_s: seconds after which they are freed whatever is renewed.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        host: str,
        port: int,
        lease_s: float,
        max_lease_s: float = 3600.0,
        bind_host: str = "",
        keys: ControlKeys | None = None,
        questions_per_s: float = DEFAULT_QUESTIONS_PER_S,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._engine_id = engine_id
        self._host = host
        self._bind_host = bind_host or host
        self._port = port
        self._lease_s = lease_s
        self._keys = keys
        self._questions_per_s = questions_per_s
        self._manifest: EngineManifest | None = None
        self._server: ControlServer | None = None
        self._leases = LeaseBook(self.incarnation, lease_s, max_lease_s)

    def publish(self, caches: GroupManifest) -> None:
        """Make the caches of all workers known and open the control channel."""
        self._manifest = EngineManifest(
            engine_id=self._engine_id,
            incarnation=self.incarnation,
            num_blocks=caches.num_blocks,
            block_tokens=caches.block_tokens,
            ranks=caches.ranks,
        )
        self._server = ControlServer(
            self._bind_host,
            self._port,
            self._answer,
            keys=self._keys,
            questions_per_s=self._questions_per_s,
        )
        self._port = self._server.port
        owned = {rank.name: len(rank.components) for rank in caches.ranks}
        logger.info(
            "MooncakeConnectorV2 producer %s: control channel on %s:%d (bound to %s, %s), "
            "%d blocks of %d tokens, caches published per rank %s, leases of %g s",
            self._engine_id,
            self._host,
            self._port,
            self._bind_host,
            "shared secret" if self._keys else "no secret",
            caches.num_blocks,
            caches.block_tokens,
            owned,
            self._lease_s,
        )

    def hand_over(
        self, request_id: str, prompt: Sequence[int], block_ids: Sequence[int]
    ) -> dict[str, object]:
        """Begin the lease on a finished request's prompt blocks; answer the response's params."""
        assert self._manifest is not None, "workers publish their caches before requests run"
        used = -(-len(prompt) // self._manifest.request_block_tokens)
        return handover_params(
            engine_id=self._engine_id,
            host=self._host,
            port=self._port,
            lease=self._leases.grant(request_id),
            lease_s=self._lease_s,
            block_ids=block_ids[:used],
            prompt=prompt,
        )

    def take_ended(self) -> frozenset[str]:
        """Requests whose blocks may be freed now; each once."""
        return frozenset(self._leases.take_ended())

    def live_leases(self) -> int:
        """Hand-overs whose blocks are kept."""
        return self._leases.live()

    def take_counts(self) -> dict[str, int]:
        """Leases granted, renewed, released and expired since the last call."""
        return self._leases.take_counts()

    def take_bad_messages(self) -> dict[wire.BadMessage, int]:
        """Messages on the control channel that were not taken up since the last call."""
        return self._server.take_bad_messages() if self._server else {}

    def close(self) -> None:
        """Close the control channel."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _answer(self, question: wire.Question) -> wire.Answer:
        match question:
            case wire.GetManifest():
                if self._manifest is None:
                    raise PeerError("this engine is still starting")
                return wire.ManifestAnswer(self._manifest)
            case wire.Renew(incarnation=incarnation, generations=generations):
                return wire.RenewAnswer(self._leases.renew(incarnation, generations))
            case wire.Confirm(lease=lease):
                return wire.LeaseAnswer(*self._leases.extend(lease))
            case wire.Release(lease=lease):
                return wire.LeaseAnswer(self._leases.release(lease))
