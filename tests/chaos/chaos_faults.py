"""What happens to nodes: stalls, cut connections, and kills, aimed at pulls under way."""

import signal

from chaos_cluster import Cluster

# What a client or the router may do to a request; see Cluster.submit.
CALL_FAULTS = (
    "abort_prefill",
    "abort_admission",
    "abort_pull",
    "abort_decode",
    "never_read",
    "other_prompt",
    "damaged",
    "late",
    "twice",
)

# Shorter than mooncake waits for progress (one second), longer, longer than blocks are held after
# three failed attempts, and longer than a lease.
STALLS_S = {"short": (0.05, 0.7), "long": (1.3, 2.5), "endless": (7.5, 9.0), "lease": (4.5, 5.5)}


ALL_NODE_FAULTS = (
    "stall short",
    "stall long",
    "stall endless",
    "stall until the lease is over",
    "stall prefill scheduler",
    "stall decode rank",
    "cut source",
    "cut reader",
    "kill prefill",
    "kill prefill rank",
    "kill decode",
    "kill decode rank",
)


class NodeFaults:
    """Hurts nodes while they transfer: on the way of a share ``rate`` of all pulls."""

    def __init__(self, cluster: Cluster, kinds: tuple[str, ...], rate: float) -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._kinds = kinds
        self._rate = rate
        self._stalled: set[tuple[str, int | None]] = set()
        self._killed: set[tuple[str, int]] = set()
        assert set(kinds) <= set(ALL_NODE_FAULTS), kinds

    def __enter__(self) -> "NodeFaults":
        self._cluster.on_decode = self._aim
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.on_decode = None

    def _aim(self, node):
        if self._rng.random() < self._rate:
            kind = self._rng.choice(self._kinds)
            # A step of the engine and a pull take about ten milliseconds each.
            self._cluster.after(self._rng.uniform(0, 0.025), lambda: self._do(kind, node))

    def _do(self, kind, reader):
        if self._act(kind, reader):
            self._cluster.injected[f"node {kind}"] += 1

    def _act(self, kind, reader):
        """Do it; answers whether it could be done."""
        source = self._cluster.prefill
        source_rank = self._rng.randrange(len(source.ranks))
        reader_rank = self._rng.randrange(len(reader.ranks))
        match kind:
            case "stall short" | "stall long" | "stall endless":
                return self._stall(source, source_rank, kind.removeprefix("stall "))
            case "stall until the lease is over":
                # A node that sleeps and wakes up: nothing renewed, a read half done.
                ranks = [self._stall(reader, rank, "lease") for rank in range(len(reader.ranks))]
                return self._stall(reader, None, "lease") and all(ranks)
            case "stall prefill scheduler":
                return self._stall(source, None, "long")
            case "stall decode rank":
                return self._stall(reader, reader_rank, "long")
            case "cut source":
                return source.cut(source_rank)
            case "cut reader":
                return reader.cut(reader_rank)
            case "kill prefill":
                return self._kill(source, source.scheduler)
            case "kill prefill rank":
                return self._kill(source, source.ranks[source_rank])
            case "kill decode":
                return self._kill(reader, reader.scheduler)
            case "kill decode rank":
                return self._kill(reader, reader.ranks[reader_rank])

    def _stall(self, node, rank, length):
        """Stop a process for a while; answers whether it was running."""
        key = (node.spec.name, rank)
        if key in self._stalled:
            return False
        self._stalled.add(key)
        started = node.starts
        node.hurt(rank, signal.SIGSTOP)

        def go_on():
            self._stalled.discard(key)
            if node.starts == started:
                node.hurt(rank, signal.SIGCONT)

        self._cluster.after(self._rng.uniform(*STALLS_S[length]), go_on)
        return True

    def _kill(self, node, process):
        """kill -9; answers whether the node was whole."""
        life = (node.spec.name, node.starts)
        if life in self._killed:
            return False
        self._killed.add(life)
        process.kill()
        return True


def storm(cluster: Cluster) -> None:
    """Everything at once: 40 requests, on a network and nodes that fail."""
    with NodeFaults(cluster, ALL_NODE_FAULTS, rate=0.4):
        cluster.proxy.rate = 0.1
        for number in range(40):
            cluster.submit(fault=("", *CALL_FAULTS)[number % (1 + len(CALL_FAULTS))])
            cluster.pump(cluster.rng.uniform(0, 0.3))
        cluster.settle(60)
        cluster.proxy.rate = 0
