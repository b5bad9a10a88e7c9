"""A bad network on the control channel: delays, drops, duplicates, reorders and garbles messages.

Garbled messages are such that a decoder can notice: the channel carries no checksums beyond TCP's.
"""

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter

import zmq

FAULTS = ("delay", "drop", "duplicate", "reorder", "garble")


class ControlProxy:
    """Stands between readers and one producer's control channel, in a thread of its own."""

    def __init__(self, producer_port: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        for pipe in (self._front, self._back):
            pipe.setsockopt(zmq.LINGER, 0)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._back.connect(f"tcp://127.0.0.1:{producer_port}")
        self._later: list[tuple[float, int, zmq.Socket, list[bytes]]] = []
        self._numbers = itertools.count()
        self._held: dict[zmq.Socket, list[bytes]] = {}
        self._stopped = threading.Event()
        self.rate = 0.0  # share of messages that something is done to
        self.faults = FAULTS
        self.injected: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        """Stop."""
        self._stopped.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _run(self):
        poller = zmq.Poller()
        ways = {self._front: self._back, self._back: self._front}
        for pipe in ways:
            poller.register(pipe, zmq.POLLIN)
        while not self._stopped.is_set():
            for pipe, _ in poller.poll(5):
                self._pass_on(pipe.recv_multipart(), ways[pipe])
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, out, frames = heapq.heappop(self._later)
                self._send(out, frames)

    def _pass_on(self, frames, out):
        fault = self._rng.choice(self.faults) if self._rng.random() < self.rate else ""
        if fault:
            self.injected[f"control {fault}"] += 1
        match fault:
            case "drop":
                return
            case "delay" | "reorder":
                # What follows overtakes it.
                pause_s = self._rng.uniform(0.02, 0.1 if fault == "reorder" else 1.5)
                self._put_off(out, frames, pause_s)
                return
            case "duplicate":
                self._put_off(out, frames, self._rng.uniform(0, 0.5))
            case "garble":
                body, at = frames[-1], self._rng.randrange(len(frames[-1]) or 1)
                noise = self._rng.randbytes(16)
                frames = [*frames[:-1], self._rng.choice((body[:at], noise, body[:5] + noise))]
        self._send(out, frames)

    def _put_off(self, out, frames, seconds):
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), out, frames))

    @staticmethod
    def _send(out, frames):
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone: a network loses it as well
            out.send_multipart(frames, flags=zmq.NOBLOCK)
