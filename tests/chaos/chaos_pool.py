"""Engines that share a real pool: a mooncake_master, engines' ranks and others that lend memory."""

import contextlib

from chaos_fleet import Call, Fleet
from chaos_model import BLOCK_TOKENS
from chaos_node import Node, NodeDiedError, forks
from pool_equipment import mooncake_master

from kvpp_connect.connectors.ascend_store.hashing import BlockChain

MODES = {
    "async": {},
    "sync": {"load_async": False},
    "layerwise": {"use_layerwise": True},
}
PATIENT = {"load_timeout_s": 60, "lookup_timeout_s": 30}
CALL_FAULTS = ("abort at once", "abort soon", "abort while loading", "abort decode")
# Objects of a client that is gone are lost after five seconds.
MASTER_FLAGS = {"client_ttl": 5, "default_kv_lease_ttl": 2000}
# Where nothing is done to them, a pause of the machine must not end a client, a read or a call.
PATIENT_SERVERS = {
    "flags": {"client_ttl": 60, "default_kv_lease_ttl": 60_000},
    "rpc_timeout_ms": 30_000,
}


def lend(pipe, address, segment_bytes):
    """Body of a process that lends memory to the pool, and removes objects when it is told."""
    from kvpp_connect.connectors.ascend_store.backends.create import create_store
    from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings

    settings = {"master_server_address": address, "global_segment_size": segment_bytes}
    store = create_store(
        parse_store_settings("mooncake", settings | {"local_buffer_size": "1MB"}, {}),
        host="127.0.0.1",
        segment=segment_bytes > 0,
    )
    pipe.send("ready")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            pattern = pipe.recv()
            # All words of the interface begin at a key's beginning.
            pipe.send(store._store.remove_by_regex(pattern, True))  # noqa: SLF001 - a vandal


class Lender:
    """A process of :func:`lend`."""

    def __init__(self, address, segment_bytes):
        self._arguments = address, segment_bytes
        self.start()

    def start(self):
        """Returns when its memory is part of the pool."""
        self._pipe, theirs = forks().Pipe()
        self._process = forks().Process(target=lend, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(60), "no lender in a minute"
        self._pipe.recv()

    def kill(self):
        """kill -9."""
        self._process.kill()
        self._process.join(10)

    def remove(self, pattern):
        """Begin to remove objects whose keys match."""
        self._pipe.send(pattern)

    def removed(self, timeout_s=60):
        """How many objects the next removal took; negative where it failed."""
        assert self._pipe.poll(timeout_s), "no answer to a removal"
        return self._pipe.recv()


class PoolCluster(Fleet):
    """Engines with AscendStoreConnector; a client sends each request to one of them."""

    def __init__(self, describe, seed, *, segment_bytes=64 << 20, flags=None):
        """Args: describe: makes the nodes' descriptions out of the master's address."""
        with contextlib.ExitStack() as stack:
            self.master = stack.enter_context(mooncake_master(**MASTER_FLAGS | (flags or {})))
            self.lender = Lender(self.master.address, segment_bytes)
            stack.callback(self.lender.kill)
            self.vandal = Lender(self.master.address, 0)
            stack.callback(self.vandal.kill)
            super().__init__([Node(spec) for spec in describe(self.master.address)], seed)
            self._stack = stack.pop_all()
        self.on_submit = None  # called with the node that a request goes to
        self._master_comes_back = None
        self._prefixes = [self.random_tokens(self.rng.randrange(90, 180)) for _ in range(3)]
        self._prompts: list[list[int]] = []

    def make_prompt(self):
        """A prompt of 40 to 400 tokens: one from before, one with a known prefix, or another."""
        if self._prompts and self.rng.random() < 0.5:
            return self.rng.choice(self._prompts)
        prefix = self.rng.choice([*self._prefixes, []])
        prompt = [*prefix, *self.random_tokens(self.rng.randrange(40, 200))]
        self._prompts.append(prompt)
        return prompt

    def submit(self, *, node=None, fault="", prompt=None, max_tokens=None):
        """Begin a request on a node (default: any); it goes on while ``pump`` runs."""
        node = self.nodes[node] if node else self.rng.choice(list(self.nodes.values()))
        number = len(self.calls)
        call = Call(
            number=number,
            request_id=f"r{number}",
            prompt=prompt or self.make_prompt(),
            max_tokens=max_tokens or self.rng.randrange(2, 30),
            fault=fault,
            stage="serving",
            decode=node.spec.name,
        )
        self.calls.append(call)
        self._send(node, call, call.prompt, call.max_tokens, None)
        match fault:
            case "abort at once":
                self._abort(node, call)
            case "abort while loading":
                with contextlib.suppress(NodeDiedError):  # noticed by pump
                    node.put("abort_loading", call.request_id)
            case "abort soon":
                self.after(self.rng.uniform(0, 0.5), lambda: self._abort(node, call))
        if self.on_submit is not None:
            self.on_submit(node)
        return call

    def send(self, count, faults=("",), pause_s=0.05, **more):
        """Requests, one after the other, with faults in turn."""
        for number in range(count):
            self.submit(fault=faults[number % len(faults)], **more)
            self.pump(self.rng.uniform(0, 2 * pause_s))

    def one_by_one(self, node, prompts):
        """Requests on a node, each when the one before is over and its blocks are stored."""
        for prompt in prompts:
            self.submit(node=node, prompt=prompt, max_tokens=2)
            self.settle(60)

    def load_with_a_shard_missing(self, block):
        """What ``b`` counts for a prompt whose block lacks one of two objects in the pool."""
        prompt = self.random_tokens(150)
        self.one_by_one("a", [prompt])
        self.vandal.remove(f":s0-1:{block_names(prompt)[block]}$")
        assert self.vandal.removed() == 1
        self.one_by_one("b", [prompt])
        return self.sums("b")

    def hurt_master(self, *, hang):
        """Kill the master or let it hang; answers whether it was there."""
        if self._master_comes_back is not None:
            return False
        (self.master.stop if hang else self.master.kill)()
        self._master_comes_back = self.master.cont if hang else self.master.start
        return True

    def mend_master(self):
        """Bring the master back, wherever it has gone."""
        if self._master_comes_back is not None:
            self._master_comes_back()
            self._master_comes_back = None

    def restart(self, node):
        """Start a node anew. An engine does not start without a master: it says so."""
        self.mend_master()
        super().restart(node)

    def close(self):
        """Stop everything; answers names of processes that did not end by themselves."""
        try:
            for node in self.nodes.values():
                node.begin_to_stop()
            return super().close()
        finally:
            self._stack.close()

    def _take(self, node, call, tokens, reason):
        call.tokens += tokens
        if call.fault == "abort decode" and tokens and reason is None:
            self._abort(node, call)

    def _ended(self, node, call, params):
        self._judge(call)


def block_names(prompt):
    """What the pool calls the full blocks of a prompt."""
    chain = BlockChain(BLOCK_TOKENS)
    chain.extend(prompt)
    return [name.hex() for name in chain.hashes]


def whole_blocks(prompt):
    """How many blocks of a prompt can be hit; the last token is always computed."""
    return (len(prompt) - 1) // BLOCK_TOKENS
