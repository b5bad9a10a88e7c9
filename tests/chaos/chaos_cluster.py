"""A prefill node, decode nodes, a router part that carries hand-overs, and the books.

Single-threaded: ``pump`` takes the nodes' events and moves requests on. A request is judged by the
tokens that its client gets; bytes are judged by the ranks (chaos_rank.py).
"""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from chaos_model import VOCABULARY, continuation
from chaos_node import Node, NodeDiedError
from chaos_proxy import ControlProxy
from chaos_spec import LEASE_S


@dataclass
class Call:
    """One request of a client, through prefill and decode."""

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


class Cluster:
    """The nodes and all that is known of the requests."""

    def __init__(self, prefill, decodes, seed):
        self.rng = random.Random(seed)
        self.prefill = Node(prefill)
        self.decodes = {spec.name: Node(spec) for spec in decodes}
        self.proxy = ControlProxy(prefill.control_port, seed)
        self.calls: list[Call] = []
        self.injected: Counter[str] = Counter()
        self.restarts = 0
        self.wrong: list[str] = []
        self.on_decode = None  # called with the decode node that is about to pull
        self._open: dict[tuple[str, str], Call] = {}
        self._timers: list[tuple[float, object]] = []
        self._counts: dict[str, tuple[int, bool]] = {}
        self._prefix = [self.rng.randrange(VOCABULARY) for _ in range(96)]

    # Requests

    def make_prompt(self):
        """A prompt of 40 to 400 tokens; some share a prefix."""
        prefix = self._prefix if self.rng.random() < 0.4 else []
        tail = self.rng.randrange(40, 400 - len(prefix))
        return [*prefix, *(self.rng.randrange(VOCABULARY) for _ in range(tail))]

    def submit(self, *, fault="", prompt=None, request_id=None, max_tokens=None):
        """Begin a request; it goes on while ``pump`` runs."""
        number = len(self.calls)
        call = Call(
            number=number,
            request_id=request_id or f"r{number}",
            prompt=prompt or self.make_prompt(),
            max_tokens=max_tokens or self.rng.randrange(2, 30),
            fault=fault,
        )
        self.calls.append(call)
        if fault:
            self.injected[f"request {fault}"] += 1
        self._send(self.prefill, call, call.prompt, 1, {"do_remote_decode": True})
        if fault == "abort_prefill":
            self.after(self.rng.uniform(0, 0.05), lambda: self._abort(self.prefill, call))
        return call

    def after(self, seconds, action):
        """Do something later, while ``pump`` runs."""
        self._timers.append((time.monotonic() + seconds, action))

    @property
    def open_calls(self):
        """Requests without an outcome."""
        return [call for call in self.calls if not call.outcome]

    @property
    def nodes(self):
        """All nodes by name; those that others ask come last, which is how they are stopped."""
        return {**self.decodes, self.prefill.spec.name: self.prefill}

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
        """Make sure that all of a node is gone and start it again, on the same control port."""
        node.kill()
        for (name, request_id), call in list(self._open.items()):
            if name == node.spec.name:
                del self._open[name, request_id]
                self._end(call, "lost")
        node.start()
        self.restarts += 1

    def settle(self, limit_s):
        """Wait until nothing is under way and every block is free again.

        Raises:
            AssertionError: requests hang, or blocks are lost.
        """
        deadline = time.monotonic() + limit_s
        while self.open_calls or self._timers:
            self._check(deadline, f"these hang: {[c.short for c in self.open_calls]}")
            self.pump(0.05)
        while True:
            self._counts = {}
            for node in self.nodes.values():
                node.put("count")
            answered_by = time.monotonic() + 10
            while len(self._counts) < len(self.nodes):
                self._check(answered_by, f"only {self._counts} answer")
                self.pump(0.02)
            wanted = {name: (node.start_blocks, False) for name, node in self.nodes.items()}
            if self._counts == wanted:
                return
            self._check(deadline, f"free blocks, and busy: {self._counts}, expected {wanted}")
            self.pump(0.2)

    def _check(self, deadline, problem):
        if time.monotonic() > deadline:
            for node in self.nodes.values():
                node.dump_stacks()
            raise AssertionError(f"{problem}; stacks are in {self.prefill.spec.log.parent}")

    def close(self):
        """Stop everything; answers names of processes that did not end by themselves."""
        late = [late for node in self.nodes.values() for late in node.stop()]
        self.injected += self.proxy.injected
        self.proxy.close()
        return late

    def outcomes(self):
        """How many requests ended how."""
        return Counter(call.outcome for call in self.calls)

    # Events of nodes

    def _event(self, node, event):
        match event:
            case ("wrong", rank, text):
                self.wrong.append(f"{node.spec.name}, rank {rank}: {text}")
            case ("fault", kind):
                self.injected[kind] += 1
            case ("count", free, busy):
                self._counts[node.spec.name] = (free, busy)
            case ("tokens", request_id, tokens, reason, params):
                call = self._open.get((node.spec.name, request_id))
                if call is None:
                    return  # of a call that the router has given up
                self._tokens(node, call, tokens, reason, params)

    def _tokens(self, node, call, tokens, reason, params):
        if node is not self.prefill:
            call.tokens += tokens
            if call.fault == "abort_decode" and tokens and reason is None:
                self._abort(node, call)
        if reason is None:
            return
        del self._open[node.spec.name, call.request_id]
        if reason == "length" and node is self.prefill:
            self._hand_over(call, params)
        elif reason == "length":
            self._judge(call)
        else:
            self._end(call, {"abort": "aborted", "rejected": "rejected"}.get(reason, "failed"))

    def _judge(self, call):
        expected = continuation(call.prompt, call.max_tokens)
        if call.tokens != expected:
            self.wrong.append(f"call {call.number}: got {call.tokens}, expected {expected}")
        self._end(call, "finished")

    # The router's part

    def _hand_over(self, call, params):
        node = self.rng.choice(list(self.decodes.values()))
        assert params is not None, f"no hand-over for {call}"
        params = {**params, "remote_port": self.proxy.port}
        call.stage = "decode"
        match call.fault:
            case "never_read":
                self._end(call, "dropped")
                return
            case "other_prompt":
                call.prompt = [*call.prompt[:-1], (call.prompt[-1] + 1) % VOCABULARY]
            case "damaged":
                params = damage(params, self.rng)
            case "late":
                self.after(LEASE_S + 0.5, lambda: self._decode(node, call, params))
                return
            case "twice":
                twin = Call(len(self.calls), f"{call.request_id}-twin", call.prompt, 3)
                twin.stage = "decode"
                self.calls.append(twin)
                self._decode(node, twin, params)
        self._decode(node, call, params)
        if call.fault == "abort_admission":
            self._abort(node, call)

    def _decode(self, node, call, params):
        call.decode = node.spec.name
        self._send(node, call, call.prompt, call.max_tokens, params)
        if call.fault == "abort_pull":
            self.after(self.rng.uniform(0, 0.03), lambda: self._abort(node, call))
        if self.on_decode is not None:
            self.on_decode(node)

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


def damage(params, rng):
    """A hand-over that something on the way has broken, so that it can be noticed."""
    ours = params["kvpp_connect"]
    choices = [
        {"remote_block_ids": params["remote_block_ids"][:-1]},
        {"remote_block_ids": [10**6] * len(params["remote_block_ids"])},
        {"remote_port": 1},
        {"remote_host": 5},
        {"kvpp_connect": None},
        {"kvpp_connect": {**ours, "generation": ours["generation"] + 1000}},
        {"kvpp_connect": {**ours, "incarnation": "somebody else"}},
        {"kvpp_connect": {**ours, "prompt_digest": "0" * 16}},
    ]
    return params | rng.choice(choices)
