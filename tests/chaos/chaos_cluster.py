"""A prefill node, decode nodes, and a router part that carries hand-overs."""

from chaos_fleet import Call, Fleet
from chaos_model import VOCABULARY
from chaos_node import Node
from chaos_proxy import ControlProxy
from chaos_spec import LEASE_S


class Cluster(Fleet):
    """P/D disaggregation: requests go through the prefill node to one of the decode nodes."""

    def __init__(self, prefill, decodes, seed):
        self.prefill = Node(prefill)
        self.decodes = {spec.name: Node(spec) for spec in decodes}
        # Those that others ask are stopped last.
        super().__init__([*self.decodes.values(), self.prefill], seed)
        self.proxy = ControlProxy(prefill.control_port, seed)
        self.on_decode = None  # called with the decode node that is about to pull
        self._prefix = self.random_tokens(96)

    def make_prompt(self):
        """A prompt of 40 to 400 tokens; some share a prefix."""
        prefix = self._prefix if self.rng.random() < 0.4 else []
        return [*prefix, *self.random_tokens(self.rng.randrange(40, 400 - len(prefix)))]

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

    def close(self):
        """Stop everything; answers names of processes that did not end by themselves."""
        late = super().close()
        self.injected += self.proxy.injected
        self.proxy.close()
        return late

    def _take(self, node, call, tokens, reason):
        if node is self.prefill:
            return
        call.tokens += tokens
        if call.fault == "abort_decode" and tokens and reason is None:
            self._abort(node, call)

    def _ended(self, node, call, params):
        if node is self.prefill:
            self._hand_over(call, params)
        else:
            self._judge(call)

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
                self.after(LEASE_S + 1.5, lambda: self._decode(node, call, params))
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
