"""A node's processes, as the harness starts, watches and hurts them."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait

import chaos_rank
from chaos_engine import run_scheduler
from chaos_spec import NodeSpec

START_S = 60.0


class NodeDiedError(Exception):
    """The node's scheduler process is gone."""


@functools.cache
def forks():
    """Processes forked from a server that has imported vLLM and mooncake, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_rank"])
    # Until Python 3.14 the server imports with the path of a fresh interpreter.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


class Node:
    """One engine of several processes."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.starts = 0  # how often it was started
        self.start()

    def start(self):
        """Start all processes; answers when requests can be sent."""
        context = forks()
        self._stopped = set()
        self.starts += 1
        to_ranks = [context.Pipe() for _ in range(self.spec.ranks)]
        cutters = [context.Pipe() for _ in range(self.spec.ranks)]
        self._pipe, theirs = context.Pipe()
        meeting = chaos_rank.meeting_file()
        self.ranks = [
            context.Process(
                target=chaos_rank.run_rank,
                args=(self.spec, rank, meeting, to_ranks[rank][1], cutters[rank][1]),
                daemon=True,
            )
            for rank in range(self.spec.ranks)
        ]
        self.scheduler = context.Process(
            target=run_scheduler, args=(self.spec, theirs, [a for a, _ in to_ranks]), daemon=True
        )
        for process in (*self.ranks, self.scheduler):
            process.start()
        self._cutters = [a for a, _ in cutters]
        # Ours alone would keep the others from seeing that a process is gone.
        for pipe in (theirs, *(p for pair in to_ranks for p in pair), *(b for _, b in cutters)):
            pipe.close()
        (ready,) = self._receive(START_S)
        self.start_blocks = ready[1]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(meeting)

    def put(self, *message):
        """Tell the scheduler process something."""
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise NodeDiedError(self.spec.name) from error

    def take(self):
        """Events since the last call."""
        events = []
        while self._pipe.poll():
            events += self._receive(0)
        return events

    @property
    def pipe(self):
        """Becomes readable with the next event."""
        return self._pipe

    def hurt(self, rank, number):
        """Send a signal to a rank, or to the scheduler process where ``rank`` is ``None``."""
        process = self.scheduler if rank is None else self.ranks[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        (self._stopped.add if number == signal.SIGSTOP else self._stopped.discard)(process)

    def dump_stacks(self):
        """Let all processes write into the log what their threads do."""
        for process in (self.scheduler, *self.ranks):
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def cut(self, rank):
        """Break the data path's connections of a rank; answers their number."""
        pipe = self._cutters[rank]
        if self.ranks[rank] in self._stopped:
            return 0
        try:
            pipe.send("cut")
            return pipe.recv() if pipe.poll(2) else 0
        except (EOFError, OSError):
            return 0

    def kill(self):
        """End all processes at once, and make sure they are gone."""
        for process in (self.scheduler, *self.ranks):
            process.kill()
        for process in (self.scheduler, *self.ranks):
            process.join(60)
            assert process.exitcode is not None, f"{process} survives SIGKILL"
        for pipe in (self._pipe, *self._cutters):
            pipe.close()

    def begin_to_stop(self):
        """Tell the node to end; ``stop`` waits for it."""
        for process in self._stopped:
            os.kill(process.pid, signal.SIGCONT)
        with contextlib.suppress(NodeDiedError):
            self.put("close")

    def stop(self, limit_s=60.0):
        """End in an orderly way; answers the names of processes that had to be killed."""
        self.begin_to_stop()
        everyone = (self.scheduler, *self.ranks)
        deadline = time.monotonic() + limit_s
        while any(p.is_alive() for p in everyone) and time.monotonic() < deadline:
            time.sleep(0.02)
        late = [p.name for p in everyone if p.is_alive()]
        if late:
            self.dump_stacks()
        self.kill()
        return late

    def _receive(self, timeout_s):
        if timeout_s and not wait([self._pipe, self.scheduler.sentinel], timeout_s):
            raise TimeoutError(f"not ready in {timeout_s} s: {self._last_words()}")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise NodeDiedError(self._last_words()) from error

    def _last_words(self):
        log = self.spec.log
        text = log.read_text(errors="replace") if log.exists() else ""
        return f"{self.spec.name}: see {log}, which ends with\n{text[-2000:]}"
