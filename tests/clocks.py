"""Clocks: one that is told the time, and one that a pause of the machine does not move."""

import threading


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class AwakeClock:
    """Seconds in which this process got its turns: never faster than real time."""

    _TICK_S = 0.01

    def __init__(self):
        self._now = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self):
        return self._now

    def sleep(self, seconds):
        end = self._now + seconds
        while self._now < end:
            self._ended.wait(self._TICK_S)

    def close(self):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.wait(self._TICK_S):
            self._now += self._TICK_S
