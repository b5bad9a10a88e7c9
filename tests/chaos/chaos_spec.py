"""What a node of the chaos suite is started with."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Sabotage = Literal["", "confirm_anything", "one_shard_will_do", "no_pins", "puts_at_once"]

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "KVPP_CONNECT_NO_SCHED_YIELD": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    # With these three a given-up read writes for at most three seconds.
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
    # Of those that lend memory; nodes have their own.
    "MC_RPC_TIMEOUT_MS": "30000",
}

# Short, so that leases end and blocks come back while a test waits.
LEASE_S = 4.0
PREFILL_SETTINGS = {"lease_s": LEASE_S, "protocol": "tcp"}
DECODE_SETTINGS = {"control_timeout_s": 1.0, "failed_read_hold_s": 4.0, "protocol": "tcp"}
# A read that was given up writes no later than this: within failed_read_hold_s.
LATE_WRITE_S = 2.0

# The pool's calls end in time; a test that is late on purpose sleeps for longer.
POOL_SETTINGS = {"load_timeout_s": 1.5, "lookup_timeout_s": 0.5, "staging_bytes": 2 << 20}
POOL_LATE_S = 2.0
POOL_READ_HOLD_S = 4.0


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One engine: a scheduler process and its ranks.

    Attributes:
        role: kv_role of vLLM.
        kvpp: each rank owns a part of the layers; else all ranks hold all of them.
        control_port: of a producer, which comes back on the same one when it is started again.
        connector: by its name in vLLM.
        settings: of the connector.
        pool: settings of a pool beside it, in vLLM's MultiConnector; empty: there is none.
        pool_first: the pool is the first of its children.
        rpc_timeout_ms: after this a pool's master that hangs is given up.
        late_reads: share of reads that fail at once, and write their destination later.
        store_faults: kinds of faults in the pool's store (chaos_store.py).
        store_rates: by kind of call, the share that goes wrong in one of these ways.
        store_slow_s: seconds that a slow call takes, at least and at most.
        seed: of these.
        sabotage: negative control; what the node does wrong.
    """

    name: str
    role: str
    model: Path
    ranks: int = 1
    kvpp: bool = False
    num_blocks: int = 160
    prefix_caching: bool = False
    policy: str = "recompute"
    control_port: int = 0
    connector: str = "MooncakeConnectorV2"
    settings: dict = field(default_factory=dict)
    pool: dict = field(default_factory=dict)
    pool_first: bool = False
    rpc_timeout_ms: int = 3000
    late_reads: float = 0.0
    store_faults: tuple[str, ...] = ()
    store_rates: dict[str, float] = field(default_factory=dict)
    store_slow_s: tuple[float, float] = (0.1, 0.4)
    seed: str = ""
    sabotage: Sabotage = ""

    @property
    def log(self) -> Path:
        """Where the node's processes write."""
        return Path(os.environ.get("KVPP_CHAOS_LOGS", self.model.parent)) / f"{self.name}.log"
