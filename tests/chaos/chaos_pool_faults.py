"""What happens to a pool and its clients, aimed at requests under way."""

import contextlib
import signal

from chaos_node import NodeDiedError
from chaos_pool import CALL_FAULTS, PoolCluster
from chaos_store import STORE_FAULTS

POOL_FAULTS = (
    "kill master",
    "stall master",
    "kill lender",
    "kill rank",
    "kill engine",
    "stall rank",
    "stall engine",
    "remove objects",
    "reset",
    "reset and preempt",
)
# Shorter and longer than a look-up and a load may take, and than a master is waited for.
STALL_S = (0.1, 4.0)
AWAY_S = (0.2, 2.0)


class PoolFaults:
    """Hurts the pool around a share ``rate`` of all requests."""

    def __init__(self, cluster: PoolCluster, kinds: tuple[str, ...], rate: float) -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._kinds = kinds
        self._rate = rate
        self._busy: set[object] = set()  # what is away, or stalled
        assert set(kinds) <= set(POOL_FAULTS), kinds

    def __enter__(self) -> "PoolFaults":
        self._cluster.on_submit = self._aim
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.on_submit = None

    def _aim(self, node):
        if self._rng.random() < self._rate:
            kind = self._rng.choice(self._kinds)
            self._cluster.after(self._rng.uniform(0, 0.1), lambda: self._do(kind, node))

    def _do(self, kind, node):
        if self._act(kind, node):
            self._cluster.injected[kind] += 1

    def _act(self, kind, node):
        """Do it; answers whether it is to be counted here."""
        cluster, rank = self._cluster, self._rng.randrange(len(node.ranks))
        match kind:
            case "kill master" | "stall master":
                hang = kind == "stall master"
                if not cluster.hurt_master(hang=hang):
                    return False
                pause_s = self._rng.uniform(*(STALL_S if hang else AWAY_S))
                cluster.after(pause_s, cluster.mend_master)
                return True
            case "kill lender":
                return self._away(cluster.lender, cluster.lender.kill, self._new_lender, AWAY_S)
            case "kill rank":
                return self._kill(node, node.ranks[rank])
            case "kill engine":
                return self._kill(node, node.scheduler)
            case "stall rank":
                return self._stall(node, rank)
            case "stall engine":
                return self._stall(node, None)
            case "remove objects":
                # Some blocks lose one shard.
                cluster.vandal.remove(f":s0-{rank}:.*[{self._rng.choice('0123')}4-7]$")
                return True
            case "reset" | "reset and preempt":
                with contextlib.suppress(NodeDiedError):  # noticed by pump
                    node.put("reset", kind == "reset and preempt")
                return False  # the node says whether it could

    def _away(self, what, hurt, mend, seconds):
        if what in self._busy:
            return False
        self._busy.add(what)
        hurt()

        def come_back():
            mend()
            self._busy.discard(what)

        self._cluster.after(self._rng.uniform(*seconds), come_back)
        return True

    def _new_lender(self):
        self._cluster.mend_master()
        self._cluster.lender.start()

    def _stall(self, node, rank):
        starts = node.starts

        def go_on():
            if node.starts == starts:
                node.hurt(rank, signal.SIGCONT)

        return self._away(
            (node.spec.name, rank), lambda: node.hurt(rank, signal.SIGSTOP), go_on, STALL_S
        )

    def _kill(self, node, process):
        """kill -9; answers whether the node was whole."""
        life = (node.spec.name, node.starts)
        if life in self._busy:
            return False
        self._busy.add(life)
        process.kill()
        return True


def storm_settings(settings):
    """Engines for :func:`storm`, with these settings of the connector."""
    return {
        "settings": settings | {"global_segment_size": "16MB"},
        "store_faults": STORE_FAULTS,
        "store_rates": {"get": 0.3, "put": 0.08, "put exists": 0.05, "lookup": 0.03},
        "num_blocks": 128,
        "only_b": {"prefix_caching": True},
    }


def storm(cluster: PoolCluster) -> None:
    """Everything at once: 45 requests, on a pool and engines that fail."""
    with PoolFaults(cluster, POOL_FAULTS, rate=0.25):
        cluster.send(45, ("", "", "", *CALL_FAULTS), pause_s=0.15)
        cluster.settle(80)
