"""All that `kvpp bench pool` measures, and the goals that it is held to."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from kvpp_connect.bench.local_ranks import run_ranks
from kvpp_connect.bench.pd import Goal
from kvpp_connect.bench.pool_bytes import BytesSetting, PoolBytes, measure_bytes
from kvpp_connect.bench.pool_lookup import LookupCost, LookupSetting, measure_lookups
from kvpp_connect.bench.pool_serving import ServingSetting, WarmPrefix, measure_warm_prefixes
from kvpp_connect.bench.pool_speed import PoolSpeed, SpeedSetting, measure_speed
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.pool_servers import POOL_PORTS_NEEDED, PoolServers
from kvpp_connect.demo.ports import free_ports

_T = TypeVar("_T")

RAW_RATIO = 0.85
BYTES_PER_KV_BYTE = 1.001  # headers included
_SEGMENT_BYTES = 1 << 30
_START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What is measured.

    Attributes:
        owners: sizes of the KVPP groups whose bytes are counted.
        limit_s: seconds for each part that starts no vLLM servers.
    """

    speed: SpeedSetting
    bytes_stored: BytesSetting
    lookup: LookupSetting
    serving: ServingSetting
    owners: tuple[int, ...] = (2, 8)
    limit_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The whole result.

    Attributes:
        load: processes that wanted a core when the benchmark began.
        kv_bytes: that are moved each way in a round.
    """

    cores: int
    load: float
    rounds: int
    kv_bytes: int
    object_bytes: int
    speeds: tuple[PoolSpeed, ...]
    bytes_stored: tuple[PoolBytes, ...]
    lookups: tuple[LookupCost, ...]
    warm_prefixes: tuple[WarmPrefix, ...]

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Every figure that has a goal."""
        return (
            *(
                Goal(
                    what=f"goodput of a {speed.way} to Mooncake's own",
                    measured=speed.raw_ratio,
                    wanted=f">= {RAW_RATIO}",
                    met=speed.raw_ratio >= RAW_RATIO,
                )
                for speed in self.speeds
            ),
            *(
                Goal(
                    what=f"bytes stored per KV byte, {row.owners} owners",
                    measured=row.bytes_per_kv_byte,
                    wanted=f"<= {BYTES_PER_KV_BYTE}",
                    met=row.bytes_per_kv_byte <= BYTES_PER_KV_BYTE,
                )
                for row in self.bytes_stored
            ),
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not depend on the machine's speed and is wrong."""
        bytes_missed = (
            f"{goal.what}: {goal.measured:.4f}, wanted {goal.wanted}"
            for goal in self.goals
            if not goal.met and goal.what.startswith("bytes")
        )
        wrong = (
            f"{row.title}: {row.answers - row.identical} of {row.answers} answers are not plain's"
            for row in self.warm_prefixes
            if row.identical != row.answers
        )
        cold = (
            f"{row.title}: {row.hit_tokens} of {row.prompt_tokens} tokens came from the pool"
            for row in self.warm_prefixes
            if row.name == "hit" and row.hit_tokens < row.prompt_tokens - 2 * 16
        )
        return (*bytes_missed, *wrong, *cold)


def measure_pool(options: PoolOptions, console: Console) -> PoolReport:
    """Measure everything, one after the other.

    Args:
        console: for progress.

    Raises:
        KvppError: a process failed, bytes are wrong, or the time is up.
    """
    load = os.getloadavg()[0]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    pool = PoolServers(ports=free_ports(POOL_PORTS_NEEDED), segment_bytes=_SEGMENT_BYTES)

    def in_process(measure: Callable[..., _T], *arguments: object) -> _T:
        return run_ranks(_measure, 1, options.limit_s, measure, cores, arguments)

    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as logs, Fleet(Path(logs)) as fleet:
        for launch in (pool.master(), pool.node()):
            fleet.start([launch], timeout_s=_START_LIMIT_S)
        with console.status("puts and loads"):
            speeds = in_process(measure_speed, options.speed, pool.address)
        with console.status("bytes"):
            stored = tuple(
                in_process(measure_bytes, options.bytes_stored, owners, pool.address, pool.figures)
                for owners in options.owners
            )
        with console.status("look-ups"):
            lookups = in_process(measure_lookups, options.lookup, pool.address)
    serving = options.serving
    return PoolReport(
        cores=len(cores),
        load=load,
        rounds=options.speed.rounds,
        kv_bytes=options.speed.kv_bytes,
        object_bytes=options.speed.object_bytes,
        speeds=speeds,
        bytes_stored=stored,
        lookups=lookups,
        warm_prefixes=measure_warm_prefixes(serving, console) if serving.prompts else (),
    )


def _measure(
    measure: Callable[..., _T], cores: tuple[int, ...], arguments: tuple[object, ...]
) -> _T:
    """Body of a process that uses the pool; Mooncake's threads may run where they like."""
    os.sched_setaffinity(0, cores)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # no report of each client's start
    return measure(*arguments)
