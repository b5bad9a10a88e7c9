"""A small process between us and a server: nothing of the server outlives us.

Usage: python guard.py PARENT_PID ORDERLY_END_S PROGRAM [ARGUMENT...]

The guard leads a process group, runs the program and ends as it ends. On SIGTERM, which the kernel
also sends when the parent dies in whatever way, it passes SIGTERM on to the program, and
ORDERLY_END_S seconds later SIGKILL to all that is left in the group. vLLM needs that: while its
engine starts, its API server survives SIGTERM. Run by path in an isolated interpreter, so this file
imports the standard library only. Linux only.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

ORPHANS_END_S = 3.0
TRACKERS_END_S = 2.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def group_members(group: int) -> tuple[int, ...]:
    """Ids of the processes of a process group that are not zombies."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid pgrp ..."; the name may hold blanks and brackets.
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                state, _, member_of = stat.rpartition(")")[2].split()[:3]
                if int(member_of) == group and state not in "ZX":
                    members.append(int(entry))
    return tuple(members)


def is_resource_tracker(pid: int) -> bool:
    """Whether a process is the one that Python's multiprocessing lets remove shared memory.

    It ends by itself after its clients; killed before, it leaves their memory in /dev/shm.
    """
    try:
        return (
            b"multiprocessing.resource_tracker" in Path("/proc", str(pid), "cmdline").read_bytes()
        )
    except OSError:
        return False


def main() -> None:
    """Run the program named on the command line and end as it ends."""
    parent, orderly_end_s, program = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    _die_with(parent)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        _die_with(guard)
        os.execv(program[0], program)
    _end_as(_watch(child, orderly_end_s))


def _watch(child: int, orderly_end_s: float) -> int:
    """Wait for the program; returns its wait status."""
    status: int | None = None
    kill_at: float | None = None  # set once it has been told to end
    while True:
        received = signal.sigtimedwait(_AWAITED, _POLL_S)
        if received is not None and received.si_signo == signal.SIGTERM and kill_at is None:
            kill_at = time.monotonic() + orderly_end_s
            if status is None:
                os.kill(child, signal.SIGTERM)
        ended = _reap()
        if child in ended:
            status = ended[child]
            if kill_at is not None:
                kill_at = min(kill_at, time.monotonic() + ORPHANS_END_S)
        if kill_at is None:
            if status is not None:
                return status
            continue
        others = [pid for pid in group_members(os.getpid()) if pid != os.getpid()]
        if not others and status is not None:
            return status
        late_s = time.monotonic() - kill_at
        for pid in others:
            if late_s >= (TRACKERS_END_S if is_resource_tracker(pid) else 0.0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _reap() -> dict[int, int]:
    """Wait statuses of the children that have ended, adopted ones included."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _end_as(status: int) -> None:
    """Exit with the program's code, or die from the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL cannot be reset, nor need it be
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _die_with(parent: int) -> None:
    """Get SIGTERM when the parent dies; ends at once where it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this is gone")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
