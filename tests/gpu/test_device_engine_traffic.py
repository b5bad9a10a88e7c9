"""The engine and its collective on CUDA devices, one for all ranks or one for each.

The first test runs the same traffic on a CPU, so that it is known to be right before it meets a
device.
"""

import os

import pytest
import torch
from device_traffic import run_all_owners_and_sizes, run_beside_all_reduces, run_forwards

from kvpp_connect.bench.broadcast import measure_broadcast
from kvpp_connect.platforms.nccl import LAUNCH_ORDER

SIZES = (0, 1, 4095, 4096, (1 << 20) + 7, 64 << 20)
FORWARDS = 40


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["full", "compact"])
def test_the_traffic_is_right_without_a_device(spawn, free_port, mode):
    ranks = [spawn(run_forwards, "cpu", mode, rank, 3, free_port, 6) for rank in range(3)]
    assert [rank.get(100) for rank in ranks] == [(0, 6 * 7)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_reads_what_the_owner_persisted_however_late_kernels_are(
    spawn, free_port, mode, ranks
):
    """On fewer devices than ranks over gloo, where the host waits; else over NCCL."""
    started = [
        spawn(run_forwards, "cuda", mode, rank, ranks, free_port, FORWARDS) for rank in range(ranks)
    ]
    assert [rank.get(300) for rank in started] == [(0, FORWARDS * 7)] * ranks


@pytest.mark.gpu
def test_all_owners_send_all_sizes(spawn, free_port):
    ranks = max(2, torch.cuda.device_count())
    started = [
        spawn(run_all_owners_and_sizes, "cuda", rank, ranks, free_port, SIZES)
        for rank in range(ranks)
    ]
    assert [rank.get(300) for rank in started] == [True] * ranks


@pytest.mark.gpu(devices=2)
def test_broadcasts_and_all_reduces_pass_each_other_where_launches_are_ordered(
    spawn, free_port, monkeypatch
):
    """Without the order this may hang: then the time limit ends it."""
    monkeypatch.setitem(os.environ, LAUNCH_ORDER, "1")
    ranks = torch.cuda.device_count()
    started = [spawn(run_beside_all_reduces, rank, ranks, free_port, 100) for rank in range(ranks)]
    assert [rank.get(300) for rank in started] == [(0, 0.0)] * ranks


@pytest.mark.gpu
def test_the_benchmark_moves_the_planned_bytes():
    report = measure_broadcast(2, (4096, 1 << 20), 1, 200, "cuda")
    assert report.failures == ()
    assert report.sharing is (torch.cuda.device_count() == 1)
    assert all(speed.bytes_per_s > 0 for size in report.sizes for speed in size.transports)
