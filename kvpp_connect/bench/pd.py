"""All that `kvpp bench pd` measures, and the goals that it is held to."""

import os
from dataclasses import dataclass

from rich.console import Console

from kvpp_connect.bench.pd_plan import PlanCost, measure_plans
from kvpp_connect.bench.pd_pull import PullSetting, PullSpeed, measure_pulls
from kvpp_connect.bench.pd_serving import FirstToken, measure_first_tokens

RAW_RATIO = 0.9
PRODUCER_BYTES = 1.02
PLAN_S = {"contiguous": 0.020, "scattered": 0.200}


@dataclass(frozen=True, slots=True, kw_only=True)
class PdOptions:
    """What is measured.

    Attributes:
        ranks: sizes of the decode group.
        block_sizes: tokens in a block, for planning.
        rounds: how often each pull and each plan is measured.
        requests: to each deployment; 0: no servers are started.
    """

    setting: PullSetting
    ranks: tuple[int, ...] = (1, 2, 4)
    block_sizes: tuple[int, ...] = (16, 64, 128)
    rounds: int = 15
    requests: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure against what it should be."""

    what: str
    measured: float
    wanted: str
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PdReport:
    """The whole result.

    Attributes:
        load: processes that wanted a core when the benchmark began.
        kv_bytes: of the prompt that is pulled.
    """

    cores: int
    load: float
    rounds: int
    kv_bytes: int
    pulls: tuple[PullSpeed, ...]
    plans: tuple[PlanCost, ...]
    first_tokens: tuple[FirstToken, ...]

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Every figure that has a goal."""
        return (
            *(
                Goal(
                    what=f"goodput to raw read, {pull.blocks} blocks",
                    measured=pull.raw_ratio,
                    wanted=f">= {RAW_RATIO}",
                    met=pull.raw_ratio >= RAW_RATIO,
                )
                for pull in self.pulls
                if pull.raw_ratio is not None
            ),
            *(
                Goal(
                    what=f"bytes leaving P per KV byte, D TP={pull.ranks}, {pull.blocks} blocks",
                    measured=pull.producer_bytes_per_kv_byte,
                    wanted=f"<= {PRODUCER_BYTES}",
                    met=pull.producer_bytes_per_kv_byte <= PRODUCER_BYTES,
                )
                for pull in self.pulls
                if pull.mode == "shared" or pull.ranks == 1
            ),
            *(
                Goal(
                    what=f"planning, {plan.blocks} blocks of {plan.block_tokens} tokens, in s",
                    measured=plan.plan.median_s,
                    wanted=f"< {PLAN_S[plan.blocks]}",
                    met=plan.plan.median_s < PLAN_S[plan.blocks],
                )
                for plan in self.plans
            ),
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not depend on the machine's speed and is wrong."""
        bytes_missed = (
            f"{goal.what}: {goal.measured:.3f}, wanted {goal.wanted}"
            for goal in self.goals
            if not goal.met and goal.what.startswith("bytes")
        )
        wrong = (
            f"{row.title}: {row.answers - row.identical} of {row.answers} answers are not plain's"
            for row in self.first_tokens
            if row.identical != row.answers
        )
        return (*bytes_missed, *wrong)


def measure_pd(options: PdOptions, console: Console) -> PdReport:
    """Measure everything, one after the other.

    Args:
        console: for progress.

    Raises:
        KvppError: a process failed, bytes are wrong, or the time is up.
    """
    load = os.getloadavg()[0]
    with console.status("pulls"):
        pulls = measure_pulls(options.setting, options.ranks)
    with console.status("plans"):
        plans = measure_plans(options.block_sizes, options.rounds)
    return PdReport(
        cores=len(os.sched_getaffinity(0)),
        load=load,
        rounds=options.rounds,
        kv_bytes=options.setting.kv_bytes,
        pulls=pulls,
        plans=plans,
        first_tokens=measure_first_tokens(options.requests, console) if options.requests else (),
    )
