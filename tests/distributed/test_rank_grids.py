"""KVPP groups in grids of vLLM's own ranks, with real gloo: numbering, right bytes, no hang.

PCP needs a model runner that vLLM has not on CPU, so this stands for it: vLLM's parallel state, the
groups that the seam derives from it, and the engine.
"""

import os

import pytest
import torch.distributed as dist
from builders import bundle_stage
from engine_traffic import Rank, run_forwards
from processes import Child

from kvpp_connect.demo.ports import free_ports

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STAGES = [
    bundle_stage([[64, 32], [64], [64, 32], [64], [64], [64, 32], [64]]),
    bundle_stage([[32], [64, 16], [32]]),
]


GRIDS = {"2 PCP x 2 TP": (2, 1, 2), "2 PP x 2 TP": (2, 2, 1)}  # sizes of TP, PP, PCP


def run_in_grids(pipe, rank, port):
    """One grid after the other, because to import vLLM takes longest."""
    os.environ["KVPP_CONNECT_NO_SCHED_YIELD"] = "1"
    from kvpp_connect.seam import quirks

    quirks.apply()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        method = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(4, rank, method, rank, "gloo")
        for sizes in GRIDS.values():
            parallel_state.initialize_model_parallel(*sizes)
            run_in_grid(pipe, rank)
            dist.barrier()
            parallel_state.destroy_model_parallel()


def run_in_grid(pipe, rank):
    from kvpp_connect.broadcast.collective import create_group_broadcast
    from kvpp_connect.seam.groups import gather_in_group, group_info, world_groups

    info = group_info()
    groups = world_groups(info.group_size)
    gathered = [value[0] for value in gather_in_group(bytes([rank]))]
    pipe.send((info.pp_rank, info.rank_in_group, info.group_size, groups, gathered))
    transport = create_group_broadcast(groups, "gloo", 60)
    for scratch_blocks in (None, 3):
        member = Rank(
            STAGES[info.pp_rank],
            info.rank_in_group,
            info.group_size,
            transport,
            blocks=6,
            scratch_blocks=scratch_blocks,
        )
        moved = run_forwards(member, 10, salt=info.pp_rank)
        counters = member.engine.counters
        pipe.send((counters.sent_bytes, counters.received_bytes, moved))


@pytest.fixture(scope="module")
def answers():
    """What every rank of every grid says: its place, and its bytes in full and compact mode."""
    (port,) = free_ports(1)
    children = [Child(run_in_grids, rank, port) for rank in range(4)]
    try:
        return {
            grid: [tuple(child.get(240) for _ in range(3)) for child in children] for grid in GRIDS
        }
    finally:
        for child in children:
            child.kill()


def check_bytes(grid, group_size):
    for mode in (1, 2):
        counted = [answer[mode] for answer in grid]
        assert all(sent + received == moved for sent, received, moved in counted)
        for first in range(0, len(counted), group_size):
            members = counted[first : first + group_size]
            assert len({moved for _, _, moved in members}) == 1
            assert sum(sent for sent, _, _ in members) == members[0][2]
            assert len([sent for sent, _, _ in members if sent]) > 1


def test_two_pcp_ranks_of_two_tp_ranks_are_one_group(answers):
    grid = answers["2 PCP x 2 TP"]
    group = (0, 1, 2, 3)
    assert [place for place, *_ in grid] == [(0, rank, 4, (group,), list(group)) for rank in group]
    check_bytes(grid, 4)


def test_two_pipeline_stages_of_two_tp_ranks_are_two_groups_side_by_side(answers):
    grid = answers["2 PP x 2 TP"]
    groups = ((0, 1), (2, 3))
    assert [place for place, *_ in grid] == [
        (stage, rank, 2, groups, list(groups[stage])) for stage in (0, 1) for rank in (0, 1)
    ]
    check_bytes(grid, 2)
