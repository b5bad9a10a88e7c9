"""One child process in a session of its own: start, watch, stop, prove that it is gone.

The child leads a new session, so everything it starts can be found and ended without touching any
other process, and a Ctrl-C in the terminal reaches only the parent. Linux is assumed (/proc).
Nothing here knows what the child serves.

Threading: start() must be called from a thread that lives as long as the child is wanted, because
the kernel ties the child to the thread that started it.
"""

import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpp_connect.demo import tied_exec
from kvpp_connect.demo.logs import read_log, root_cause, tail
from kvpp_connect.errors import KvppError

_POLL_S = 0.05
_ORPHAN_GRACE_S = 3.0
_KILL_WAIT_S = 2.0
_KILL_ATTEMPTS = 3


class ServerError(KvppError):
    """A server that failed: the message is one line, `log_tail` holds the last log lines."""

    def __init__(self, server: str, what: str, *, log_path: Path) -> None:
        text = read_log(log_path)
        self.server = server
        self.log_path = log_path
        self.log_tail = tail(text)
        cause = root_cause(text)
        super().__init__(f"{server}: {what}" + (f": {cause}" if cause else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start and where it will answer."""

    name: str
    argv: tuple[str, ...]  # argv[0] is an absolute path
    port: int  # on the loopback interface
    env: Mapping[str, str] = field(default_factory=dict)  # on top of the parent's environment
    other_ports: tuple[int, ...] = ()  # further ports that the program will bind
    health_path: str = "/health"
    scratch_pattern: str = ""  # regex of file names in the log that the program may leave behind


class ServerProcess:
    """A started Launch."""

    def __init__(self, launch: Launch, *, log_path: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self._popen: subprocess.Popen[bytes] | None = None
        self._leader_exit_code: int | None = None

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return self.launch.name

    def start(self) -> None:
        """Start the program; its output goes to the log file."""
        guard = (sys.executable, "-I", "-S", tied_exec.__file__, str(os.getpid()))
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [*guard, *self.launch.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.launch.env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Process id, which is also the session id; None when nothing runs any more."""
        return self._popen.pid if self._popen else None

    def exit_code(self) -> int | None:
        """Exit code of the program (negative: the signal), None while it runs.

        The process is not reaped before stop(), so its id cannot be given to a stranger while
        members of its session are still looked for.
        """
        if self._popen is not None and self._leader_exit_code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            info = os.waitid(os.P_PID, self._popen.pid, options)
            if info is not None:
                killed = info.si_code != os.CLD_EXITED
                self._leader_exit_code = -info.si_status if killed else info.si_status
        return self._leader_exit_code

    def error(self, what: str) -> ServerError:
        """An error about this server with what its log says now."""
        return ServerError(self.name, what, log_path=self.log_path)

    def check_running(self) -> None:
        """Raise ServerError if the program has ended."""
        code = self.exit_code()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise self.error(how)

    def stop(self, *, grace_s: float = 15.0) -> None:
        """End the program and everything it started. May be called again, does nothing then.

        Raises:
            ServerError: processes survived SIGKILL.
        """
        stop_all([self], grace_s=grace_s)

    def members(self) -> tuple[int, ...]:
        """Ids of the living processes of the session, the program's own included."""
        return session_members(self.pid) if self.pid is not None else ()

    def send(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """Signal the program, or each living process of its session."""
        if self.pid is None:
            return
        targets = self.members() if to_all else (self.pid,)
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

    def reap(self) -> None:
        """Collect the exit status of an ended program and forget its id."""
        if self._popen is not None:
            self.exit_code()
            self._popen.wait(timeout=_KILL_WAIT_S)
            self._popen = None
            self._remove_scratch()

    def _remove_scratch(self) -> None:
        """Remove temporary files and shared memory of the ended program, by names in its log."""
        if self.launch.scratch_pattern:
            for name in set(re.findall(self.launch.scratch_pattern, read_log(self.log_path))):
                for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
                    for path in folder.glob(f"{glob.escape(name)}*"):
                        path.unlink(missing_ok=True)


def stop_all(processes: Sequence[ServerProcess], *, grace_s: float) -> None:
    """Stop several servers together: SIGTERM to each program, later SIGKILL to what is left.

    Args:
        processes: started or not, stopped or not.
        grace_s: time for an orderly end, in seconds.

    Raises:
        ServerError: processes survived SIGKILL.
    """
    for process in processes:
        process.send(signal.SIGTERM)
    left = _wait_until_gone(processes, grace_s)
    for _ in range(_KILL_ATTEMPTS):  # a member may fork while the others are being killed
        for process in left:
            process.send(signal.SIGKILL, to_all=True)
        left = _wait_until_gone(left, _KILL_WAIT_S)
    for process in processes:
        if process not in left:
            process.reap()
    if left:
        raise left[0].error(f"processes {left[0].members()} survived SIGKILL")


def _wait_until_gone(processes: Sequence[ServerProcess], limit_s: float) -> list[ServerProcess]:
    """Wait for sessions to become empty; returns those that are not.

    Processes that outlive their leader get no more than three seconds from its end on.
    """
    limits = dict.fromkeys(processes, time.monotonic() + limit_s)
    while True:
        waiting = [process for process in limits if process.members()]
        now = time.monotonic()
        for process in waiting:
            if process.exit_code() is not None:
                limits[process] = min(limits[process], now + _ORPHAN_GRACE_S)
        if not any(now < limits[process] for process in waiting):
            return waiting
        time.sleep(_POLL_S)


def session_members(session: int) -> tuple[int, ...]:
    """Ids of the processes of a session that are not zombies."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid pgrp session ..."; the name may hold blanks and brackets.
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                state, _, _, member_of = stat.rpartition(")")[2].split()[:4]
                if int(member_of) == session and state not in "ZX":
                    members.append(int(entry))
    return tuple(members)
