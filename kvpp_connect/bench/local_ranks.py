"""Runs one function in several processes that form a group, and collects what they return."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvpp_connect.errors import KvppError, PeerError

_END_S = 5.0


def run_ranks(function: Callable[..., Any], ranks: int, limit_s: float, *arguments: Any) -> Any:  # noqa: ANN401 - the function's
    """Call ``function(*arguments)`` on every rank of a new world; returns rank 0's answer.

    Each rank has a core of its own where there are enough of them, as vLLM binds its CPU workers.

    Args:
        function: at the top of a module, with arguments that can be pickled.
        limit_s: seconds after which all ranks are ended.

    Raises:
        KvppError: a rank failed, ended early, or the time is up.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        store = Path(folder, "store").as_uri()
        pipes: dict[Any, int] = {}
        processes = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(theirs, store, rank, ranks, function, arguments)
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            answer = _collect(pipes, limit_s)
            for process in processes:
                process.join(_END_S)
            return answer
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Any, int], limit_s: float) -> Any:  # noqa: ANN401 - the function's
    """Wait for the answer of every rank; ``pipes`` gives the ranks."""
    answer, deadline = None, time.monotonic() + limit_s
    while pipes:
        ready = wait(list(pipes), max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise KvppError(f"not finished after {limit_s:g} s: see --timeout")
        for pipe in ready:
            rank = pipes.pop(pipe)
            assert isinstance(pipe, Connection)
            try:
                good, value = pipe.recv()
            except EOFError:
                raise PeerError(f"rank {rank} of the benchmark ended early") from None
            if not good:
                raise KvppError(f"rank {rank} of the benchmark failed: {value}")
            if rank == 0:
                answer = value
    return answer


def _rank(
    pipe: Connection,
    store: str,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Body of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    # Else a rank that fails at once breaks the connections that another one is still making, and
    # that one's message hides the cause.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        torch.set_num_threads(1)
        value = function(*arguments)
        dist.barrier()
        pipe.send((True, value))
    except KvppError as error:
        pipe.send((False, str(error)))
    except Exception as error:  # noqa: BLE001 - the process boundary; the parent shows it
        pipe.send((False, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # gloo's threads may still wait for ranks that failed
