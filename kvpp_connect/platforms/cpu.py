"""The CPU: work is done when the call returns, so events have nothing to order."""

from contextlib import AbstractContextManager, nullcontext

from kvpp_connect.platforms.device import StreamEvent


class _NoEvent:
    def record(self) -> None:
        return

    def wait(self) -> None:
        return


class CpuDevice:
    """A device without streams."""

    def __init__(self) -> None:
        self._event = _NoEvent()
        self._transfers = nullcontext()

    def event(self) -> StreamEvent:
        """The one event, which does nothing."""
        return self._event

    def transfers(self) -> AbstractContextManager[object]:
        """Changes nothing."""
        return self._transfers

    def finish_transfers(self) -> None:
        """Nothing is under way."""
