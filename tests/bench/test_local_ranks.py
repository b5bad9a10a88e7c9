"""Groups of processes that work, fail, vanish and hang."""

import os
import time

import pytest
import torch.distributed as dist

from kvpp_connect.bench.local_ranks import run_ranks
from kvpp_connect.errors import ConfigError, KvppError, PeerError

pytestmark = pytest.mark.distributed


def add_ranks(offset):
    rows = [0] * dist.get_world_size()
    dist.all_gather_object(rows, dist.get_rank() + offset)
    return rows


def fail_on_rank_1(kind):
    if dist.get_rank() == 1:
        if kind == "refuse":
            raise ConfigError("not like this")
        if kind == "bug":
            raise ZeroDivisionError("of ours")
        if kind == "vanish":
            os._exit(3)
    time.sleep(600)


def test_every_rank_runs_and_the_first_ones_answer_comes_back():
    assert run_ranks(add_ranks, 3, 60, 100) == [100, 101, 102]


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("refuse", KvppError, "^rank 1 of the benchmark failed: not like this$"),
        ("bug", KvppError, "^rank 1 of the benchmark failed: ZeroDivisionError: of ours$"),
        ("vanish", PeerError, "^rank 1 of the benchmark ended early$"),
    ],
)
def test_a_rank_that_fails_ends_all(kind, error, said):
    with pytest.raises(error, match=said):
        run_ranks(fail_on_rank_1, 2, 60, kind)


def test_the_time_limit_ends_all():
    with pytest.raises(KvppError, match="not finished after 1 s: see --timeout"):
        run_ranks(fail_on_rank_1, 2, 1, "hang")
