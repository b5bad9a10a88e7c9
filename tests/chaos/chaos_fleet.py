"""Nodes, the requests that clients have on them, and the books: what all clusters have in common.

Single-threaded: ``pump`` takes the nodes' events and moves requests on. A request is judged by the
tokens that its client gets; bytes are judged by the ranks (chaos_rank.py).
"""

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from chaos_model import VOCABULARY, continuation
from chaos_node import Node, NodeDiedError


@dataclass
class Call:
    """One request of a client."""

    number: int
    request_id: str
    prompt: list[int]
    max_tokens: int
    fault: str = ""  # what the router or the client does wrong
    stage: str = "prefill"
    decode: str = ""  # name of its decode node
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""  # finished, aborted, lost, rejected, failed, dropped

    @property
    def short(self):
        """Without the tokens."""
        return f"{self.request_id} {self.fault} in {self.stage} {self.decode}"


class Fleet(ABC):
    """The nodes and all that is known of the requests."""

    def __init__(self, nodes: list[Node], seed) -> None:
        self.rng = random.Random(seed)
        self.nodes = {node.spec.name: node for node in nodes}  # stopped in this order
        self.calls: list[Call] = []
        self.injected: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.restarts = 0
        self._restart_s = 0.0
        self.wrong: list[str] = []
        self._open: dict[tuple[str, str], Call] = {}
        self._timers: list[tuple[float, object]] = []
        self._counts: dict[str, tuple[int, bool]] = {}
        self._sums: dict[str, dict[str, float]] = {}

    # Requests

    def after(self, seconds, action):
        """Do something later, while ``pump`` runs."""
        self._timers.append((time.monotonic() + seconds, action))

    @property
    def open_calls(self):
        """Requests without an outcome."""
        return [call for call in self.calls if not call.outcome]

    def outcomes(self):
        """How many requests ended how."""
        return Counter(call.outcome for call in self.calls)

    def random_tokens(self, length):
        """Random tokens."""
        return [self.rng.randrange(VOCABULARY) for _ in range(length)]

    def pump(self, seconds):
        """Let things happen for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            wait([node.pipe for node in self.nodes.values()], min(left, 0.01))
            for node in self.nodes.values():
                try:
                    for event in node.take():
                        self._event(node, event)
                except NodeDiedError:
                    self.restart(node)  # as whatever watches over servers does
            now = time.monotonic()
            due = [action for at, action in self._timers if at <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for action in due:
                action()

    def restart(self, node):
        """Make sure that all of a node is gone and start it again, on the same ports."""
        began = time.monotonic()
        node.kill()
        for (name, request_id), call in list(self._open.items()):
            if name == node.spec.name:
                del self._open[name, request_id]
                self._end(call, "lost")
        node.start()
        self.restarts += 1
        self._restart_s += time.monotonic() - began

    def settle(self, limit_s):
        """Wait until nothing is under way and every block is free again.

        Raises:
            AssertionError: requests hang, or blocks are lost.
        """
        deadline = self._clock() + limit_s
        while self.open_calls or self._timers:
            self._check(deadline, f"these hang: {[c.short for c in self.open_calls]}")
            self.pump(0.05)
        before = self.restarts
        while True:
            self._counts, restarts = {}, self.restarts
            for node in self.nodes.values():
                with contextlib.suppress(NodeDiedError):  # noticed by pump
                    node.put("count")
            answered_by = self._clock() + 60
            while len(self._counts) < len(self.nodes) and self.restarts == restarts:
                self._check(answered_by, f"only {self._counts} answer")
                self.pump(0.02)
            if self.restarts != restarts:
                # Nothing is done to nodes any more: each may be found dead once.
                assert self.restarts - before <= len(self.nodes), "idle nodes die"
                continue  # the new process was not asked
            wanted = {name: (node.start_blocks, False) for name, node in self.nodes.items()}
            if self._counts == wanted:
                return
            self._check(deadline, f"free blocks, and busy: {self._counts}, expected {wanted}")
            self.pump(0.2)

    def _clock(self):
        """Seconds; those that nodes take to start again do not count."""
        return time.monotonic() - self._restart_s

    def _check(self, deadline, problem):
        if self._clock() > deadline:
            for node in self.nodes.values():
                node.dump_stacks()
            logs = next(iter(self.nodes.values())).spec.log.parent
            raise AssertionError(f"{problem}; stacks are in {logs}")

    def sums(self, name):
        """A node's counters since the last call."""
        self._sums.pop(name, None)
        self.nodes[name].put("sums")
        for _ in range(1200):
            self.pump(0.05)
            if name in self._sums:
                return Counter(self._sums[name])
        raise AssertionError(f"{name} tells no sums")

    def close(self):
        """Stop everything; answers names of processes that did not end by themselves."""
        return [late for node in self.nodes.values() for late in node.stop()]

    # Events of nodes

    def _event(self, node, event):
        match event:
            case ("wrong", rank, text):
                self.wrong.append(f"{node.spec.name}, rank {rank}: {text}")
            case ("fault", kind):
                self.injected[kind] += 1
            case ("seen", kind):
                self.seen[kind] += 1
            case ("count", free, busy):
                self._counts[node.spec.name] = (free, busy)
            case ("sums", sums):
                self._sums[node.spec.name] = sums
            case ("tokens", request_id, tokens, reason, params):
                call = self._open.get((node.spec.name, request_id))
                if call is None:
                    return  # of a call that the router has given up
                self._tokens(node, call, tokens, reason, params)

    def _tokens(self, node, call, tokens, reason, params):
        self._take(node, call, tokens, reason)
        if reason is None:
            return
        del self._open[node.spec.name, call.request_id]
        if reason == "length":
            self._ended(node, call, params)
        else:
            self._end(call, {"abort": "aborted", "rejected": "rejected"}.get(reason, "failed"))

    @abstractmethod
    def _take(self, node, call, tokens, reason):
        """A request's tokens have come; ``reason`` is that of its end."""

    @abstractmethod
    def _ended(self, node, call, params):
        """A node is through with a request."""

    def _judge(self, call):
        expected = continuation(call.prompt, call.max_tokens)
        if call.tokens != expected:
            self.wrong.append(f"call {call.number}: got {call.tokens}, expected {expected}")
        self._end(call, "finished")

    def _send(self, node, call, prompt, max_tokens, params):
        key = (node.spec.name, call.request_id)
        if key in self._open:
            self._end(call, "rejected")
            return
        self._open[key] = call
        try:
            node.put("add", call.request_id, prompt, max_tokens, params)
        except NodeDiedError:
            del self._open[key]
            self._end(call, "lost")

    def _abort(self, node, call):
        if (node.spec.name, call.request_id) in self._open:
            try:
                node.put("abort", call.request_id)
            except NodeDiedError:
                return  # noticed by pump

    @staticmethod
    def _end(call, outcome):
        call.outcome = call.outcome or outcome
