"""Turning the signals that end a program into one exception, once."""

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell reports for this signal, 130 for Ctrl-C."""
        return 128 + self.number


class SignalGuard:
    """While entered, the first SIGINT, SIGTERM or SIGHUP raises Interrupted; later ones wait.

    close() stops the raising, so that clean-up code runs to its end; leave() restores the former
    handlers and raises what arrived in between. Guards may be left in any order: one that is left
    while a later one is still entered passes signals on. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Any] = {}
        self._quiet = False
        self._left = False
        self._pending: int | None = None

    def enter(self) -> None:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def close(self) -> None:
        """From now on only remember signals."""
        self._quiet = True

    def leave(self) -> None:
        """Restore the handlers; raises Interrupted for a signal that came after close()."""
        self._left = True
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        if self._pending is not None:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._left:
            self._pass_on(signal.Signals(number), frame)
        elif self._quiet:
            self._pending = self._pending or number
        else:
            self._quiet = True
            raise Interrupted(number)

    def _pass_on(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Do what would have happened without this guard."""
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
