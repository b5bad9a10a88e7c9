"""The prefetch engine: each layer's bundle arrives just before the layer touches its cache.

One forward is ``arm``, then ``acquire`` and ``release`` for each target layer in order, then
``finish``. ``arm`` starts the first bundle; ``acquire(i)`` waits for bundle ``i`` and starts bundle
``i + 1`` into the other scratch slot, whose last reader, layer ``i - 1``, was released before.

    IDLE --arm--> DUE(0) --acquire--> HELD(0) --release--> DUE(1) ... DUE(n) --finish--> IDLE

The bytes that an owner sends may still be on their way into its cache, see :class:`BundleGate`:
then its bundle starts when its layer asks for it, on that rank only. Where streams order the
transport this would give the device its collectives, the model's among them, in another order than
the other ranks', which may stop all of them: there no bundle of such a forward starts ahead.

Every other call is an error. After an error, or ``abandon``, the engine is DEAD: its peers are out
of step, and no later forward may run.

Transfers have a stream of their own where the device has streams, and three kinds of events order
them; the host waits in ``acquire`` for transports that are not ordered by streams, else never.

    ready    compute -> transfer   the sources are written; nobody reads scratch any more
    drained  compute -> transfer   the slot's last reader in this forward is done
    arrived  transfer -> compute   the layer may read and write; its owner, whose source was being
                                   read, may write

Not thread-safe; driven by the thread that runs the model.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn, Protocol

from kvpp_connect.broadcast.collective import GroupBroadcast, PendingBroadcast, StreamOrdered
from kvpp_connect.broadcast.payload import BundlePayload
from kvpp_connect.errors import KvppError
from kvpp_connect.layout import RankPlacement
from kvpp_connect.platforms.device import Device


class BroadcastError(KvppError):
    """The engine was driven out of order, or a broadcast failed."""


class BundleGate(Protocol):
    """Says when the caches that this rank owns hold what the forward may read."""

    def is_open(self, ordinal: int) -> bool:
        """Whether the ``ordinal``-th target layer may be read."""
        ...

    def wait(self, ordinal: int) -> None:
        """Return when it may be, which is in time whatever becomes of its bytes."""
        ...


@dataclass(slots=True, kw_only=True)
class BroadcastCounters:
    """Totals since start."""

    forwards: int = 0
    broadcasts: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class _State(Enum):
    IDLE = auto()  # between forwards
    DUE = auto()  # the layer at _ordinal has not asked for its cache yet
    HELD = auto()  # the layer at _ordinal uses its cache
    DEAD = auto()  # _failure says why


class PrefetchEngine:
    """Broadcast engine of one rank."""

    def __init__(
        self,
        placement: RankPlacement,
        payload: BundlePayload,
        transport: GroupBroadcast,
        device: Device,
        gate: BundleGate | None = None,
    ) -> None:
        """Bind the plan to its bytes and reserve the events.

        Args:
            placement: where this rank's bundles lie.
            payload: the bytes to move for each bundle.
            transport: broadcast inside the KVPP group.
            device: where the bytes lie.
            gate: of somebody who writes owned caches while forwards run; on all ranks or on none.
        """
        self._rank = placement.rank
        self._bundles = placement.bundles
        self._names = [bundle.components[0].layer_name for bundle in placement.layout.stage.targets]
        self._payload = payload
        self._transport = transport
        self._device = device
        self._gate = gate
        self._one_order = gate is not None and isinstance(transport, StreamOrdered)
        self._ahead = True
        self._ready = device.event()
        # One is enough: it is waited for before the next bundle starts and records it again.
        self._arrived = device.event()
        self._drained = {slot: device.event() for slot in {b.slot for b in self._bundles}}
        # Slots that a layer of this forward has read since their last refill.
        self._read_slots: set[int] = set()
        self._state = _State.IDLE
        self._ordinal = 0
        self._pending: list[PendingBroadcast] = []
        self._failure = ""
        self.counters = BroadcastCounters()

    @property
    def armed(self) -> bool:
        """Whether layers have to ask for their cache; a dead engine refuses it to them."""
        return self._state is not _State.IDLE

    @property
    def held(self) -> int | None:
        """The layer that holds its cache now."""
        return self._ordinal if self._state is _State.HELD else None

    def arm(self, *, start: bool = True) -> None:
        """Begin a forward with history.

        Args:
            start: whether to start the first bundle; else its layer does, since owners are still
                given what the forward reads. The same on all ranks.

        Raises:
            BroadcastError: the last forward was not finished, the engine is dead, or the first
                broadcast cannot start.
        """
        self._check(self._state is _State.IDLE, "a forward began")
        self.counters.forwards += 1
        self._read_slots.clear()
        self._ready.record()
        with self._device.transfers():
            self._ready.wait()
        self._state, self._ordinal = _State.DUE, 0
        self._ahead = start or not self._one_order
        if start:
            self._start(0)

    def acquire(self, ordinal: int) -> None:
        """Give the ``ordinal``-th target layer its cache, and start the next bundle.

        Work that the current stream is given afterwards may read and write the cache.

        Raises:
            BroadcastError: not this layer's turn, its broadcast failed, or the next one cannot
                start.
        """
        due = self._state is _State.DUE and self._ordinal == ordinal
        self._check(due, f"layer {self._names[ordinal]} asked for its cache")
        if not self._pending:
            self._wait_at_gate(ordinal)
            self._start(ordinal)
        assert self._pending, "they have just been started, if not before"
        pending, self._pending = self._pending, []
        try:
            for broadcast in pending:
                broadcast.wait()
        except KvppError as error:
            self._fail(f"layer {self._names[ordinal]}: {error}")
        self._arrived.wait()
        self._state = _State.HELD
        if self._ahead:
            self._start(ordinal + 1)

    def release(self, ordinal: int) -> None:
        """Take the cache back from the layer, all of whose work has been given to the stream.

        Raises:
            BroadcastError: the layer does not hold its cache.
        """
        held = self._state is _State.HELD and self._ordinal == ordinal
        self._check(held, f"layer {self._names[ordinal]} gave its cache back")
        bundle = self._bundles[ordinal]
        if bundle.owner != self._rank:  # owned layers do not read scratch
            self._drained[bundle.slot].record()
            self._read_slots.add(bundle.slot)
        self._state, self._ordinal = _State.DUE, ordinal + 1

    def finish(self) -> None:
        """End the forward.

        Raises:
            BroadcastError: a target layer did not ask for its cache or did not give it back.
        """
        done = self._state is _State.DUE and self._ordinal == len(self._bundles)
        self._check(done, "the forward ended")
        self._state = _State.IDLE

    def abandon(self, reason: str) -> None:
        """Declare the engine dead after the forward itself failed; the first reason stays."""
        self._failure = self._failure or reason
        self._state = _State.DEAD

    def _start(self, ordinal: int) -> None:
        if ordinal == len(self._bundles):
            return
        owner, slot = self._bundles[ordinal].owner, self._bundles[ordinal].slot
        if self._gate is not None and owner == self._rank and not self._gate.is_open(ordinal):
            return  # its layer waits at the gate
        with self._device.transfers():
            if slot in self._read_slots:
                self._drained[slot].wait()
                self._read_slots.discard(slot)
            try:
                pieces = self._payload.pieces(ordinal)
                self._pending = [
                    self._transport.start(piece.data, owner, piece.gather) for piece in pieces
                ]
            except KvppError as error:
                self._fail(f"layer {self._names[ordinal]}: {error}")
            self._arrived.record()
        self.counters.broadcasts += len(pieces)
        size = sum(piece.data.numel() for piece in pieces)
        if owner == self._rank:
            self.counters.sent_bytes += size
        else:
            self.counters.received_bytes += size

    def _wait_at_gate(self, ordinal: int) -> None:
        if self._gate is not None and self._bundles[ordinal].owner == self._rank:
            self._gate.wait(ordinal)

    def _situation(self) -> str:
        if self._state is _State.IDLE:
            return "no forward is under way"
        if self._ordinal == len(self._names):
            return "all layers are done"
        holds = "holds its cache" if self._state is _State.HELD else "is due"
        return f"layer {self._names[self._ordinal]} {holds}"

    def _check(self, allowed: bool, what: str) -> None:
        if self._state is _State.DEAD:
            raise BroadcastError(
                f"KVPP rank {self._rank}: the broadcast engine stopped earlier: {self._failure}"
            )
        if not allowed:
            self._fail(f"{what}, but {self._situation()}")

    def _fail(self, reason: str) -> NoReturn:
        self.abandon(reason)
        raise BroadcastError(f"KVPP rank {self._rank}: {reason}")
