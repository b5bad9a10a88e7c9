"""The prefetch engine: each layer's bundle arrives just before the layer touches its cache.

One forward is ``arm`` -> ``acquire`` for each target layer in order -> ``finish``. ``arm`` starts
the first bundle; ``acquire(i)`` waits for bundle ``i`` and starts bundle ``i + 1`` into the other
scratch slot, whose last reader, layer ``i - 1``, is done by then. Owners wait as well: their
source is being read, and they are about to write it.

After an error the engine is dead: its peers are out of step, and no later forward may run.
Not thread-safe; driven by the thread that runs the model.
"""

from dataclasses import dataclass

from kvpp_connect.broadcast.collective import GroupBroadcast, PendingBroadcast
from kvpp_connect.broadcast.payload import BundlePayload
from kvpp_connect.errors import KvppError
from kvpp_connect.layout import RankPlacement


class BroadcastError(KvppError):
    """The engine was driven out of order, or a broadcast failed."""


@dataclass(slots=True, kw_only=True)
class BroadcastCounters:
    """Totals since start."""

    forwards: int = 0
    broadcasts: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class PrefetchEngine:
    """Broadcast engine of one rank."""

    def __init__(
        self, placement: RankPlacement, payload: BundlePayload, transport: GroupBroadcast
    ) -> None:
        """Bind the plan to its bytes.

        Args:
            placement: where this rank's bundles lie.
            payload: the bytes to move for each bundle.
            transport: broadcast inside the KVPP group.
        """
        self._rank = placement.rank
        self._bundles = placement.bundles
        self._payload = payload
        self._names = [bundle.components[0].layer_name for bundle in placement.layout.stage.targets]
        self._transport = transport
        self._next: int | None = None
        self._pending: PendingBroadcast | None = None
        self._failure: str | None = None
        self.counters = BroadcastCounters()

    @property
    def armed(self) -> bool:
        """Whether a forward that broadcasts is under way."""
        return self._next is not None

    def arm(self) -> None:
        """Begin a forward with history: start the first bundle.

        Raises:
            BroadcastError: the last forward was not finished, or the engine is dead.
        """
        self._check_alive()
        if self._next is not None:
            self._fail(f"a forward began while layer {self._where()} of the last one was due")
        self.counters.forwards += 1
        self._next = 0
        self._start(0)

    def acquire(self, ordinal: int) -> None:
        """Wait until the ``ordinal``-th target layer's cache may be read and written.

        Raises:
            BroadcastError: not this layer's turn, or its broadcast failed.
        """
        self._check_alive()
        if self._next != ordinal:
            self._fail(f"layer {self._names[ordinal]} asked for its cache, due is {self._where()}")
        pending, self._pending = self._pending, None
        assert pending is not None, "an armed engine has a broadcast under way"
        try:
            pending.wait()
        except KvppError as error:
            self._fail(f"layer {self._names[ordinal]}: {error}")
        self._next = ordinal + 1
        if self._next < len(self._bundles):
            self._start(self._next)

    def finish(self) -> None:
        """End the forward.

        Raises:
            BroadcastError: a target layer never asked for its cache.
        """
        self._check_alive()
        if self._next != len(self._bundles):
            self._fail(f"the forward ended while layer {self._where()} was due")
        self._next = None

    def abandon(self, reason: str) -> None:
        """Declare the engine dead after the forward itself failed."""
        self._failure = self._failure or reason

    def _start(self, ordinal: int) -> None:
        owner, data = self._bundles[ordinal].owner, self._payload.bytes_of(ordinal)
        self._pending = self._transport.start(data, owner)
        self.counters.broadcasts += 1
        if owner == self._rank:
            self.counters.sent_bytes += data.numel()
        else:
            self.counters.received_bytes += data.numel()

    def _where(self) -> str:
        if self._next is None:
            return "none (no forward is under way)"
        return self._names[self._next] if self._next < len(self._names) else "none (all done)"

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise BroadcastError(
                f"KVPP rank {self._rank}: the broadcast engine stopped earlier: {self._failure}"
            )

    def _fail(self, reason: str) -> None:
        self._failure = reason
        raise BroadcastError(f"KVPP rank {self._rank}: {reason}")
