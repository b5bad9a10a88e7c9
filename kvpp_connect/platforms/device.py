"""What the broadcast engine asks of a device: one transfer stream, and events between streams.

A stream is an order of work. Work of different streams runs in any order that the events between
them allow, and the host runs ahead of both. "Current" is the stream that the calling thread's
work goes to: the model's own, or inside ``Device.transfers()`` the transfer stream.

Life cycle: a device and its events are made at start and used until the process ends; nothing is
made during a forward. Not thread-safe; driven by the thread that runs the model.
"""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol


class StreamEvent(Protocol):
    """A mark in a stream's order of work, used again and again."""

    def record(self) -> None:
        """Mark the work that the current stream has been given up to now.

        Replaces the last mark for later waits; waits that were called earlier keep theirs.
        """
        ...

    def wait(self) -> None:
        """Let work that the current stream is given from now on run after the marked work.

        The host goes on at once. Without a mark there is nothing to wait for.
        """
        ...


class Device(Protocol):
    """One rank's device."""

    def event(self) -> StreamEvent:
        """Reserve an event; only at start."""
        ...

    def transfers(self) -> AbstractContextManager[object]:
        """Make the transfer stream current for the duration of the context."""
        ...

    def finish_transfers(self) -> None:
        """Wait on the host for all work of the transfer stream. Never called by a forward."""
        ...


class StreamDevice:
    """A device whose streams have the interface of ``torch.cuda``, with a transfer stream on it."""

    def __init__(self, streams: ModuleType, **options: Any) -> None:  # noqa: ANN401 - the stream's
        """Make the transfer stream on the current device.

        Args:
            streams: ``torch.cuda``, ``torch.npu``, or a module of the same shape.
            options: of the transfer stream.
        """
        self._streams = streams
        self._transfers = streams.Stream(**options)

    def event(self) -> StreamEvent:
        """Reserve an event."""
        event = self._streams.Event()
        event.record()  # torch makes the device's event at its first record: now, not in a forward
        return event

    def transfers(self) -> AbstractContextManager[object]:
        """Make the transfer stream current."""
        # A new context each time: torch_npu's cannot be entered twice.
        return self._streams.stream(self._transfers)

    def finish_transfers(self) -> None:
        """Wait on the host for all work of the transfer stream."""
        self._transfers.synchronize()
