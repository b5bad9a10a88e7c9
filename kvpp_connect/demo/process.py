"""One child process in a process group of its own: start, watch, stop, prove that it is gone.

The program runs below a guard (guard.py) that leads a new process group, so everything it starts
can be found and ended without touching any other process, and a Ctrl-C in the terminal reaches only
the parent. It is no session of its own: between sessions Linux shares the processors first
(sched_autogroup), and a busy server then starves another one's transfer threads for seconds.
Linux is assumed (/proc). Nothing here knows what the program serves.

Threading: start() must be called from a thread that lives as long as the program is wanted, because
the kernel ties the guard to the thread that started it.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpp_connect.demo import guard
from kvpp_connect.demo.guard import ORPHANS_END_S, group_members, is_resource_tracker
from kvpp_connect.demo.logs import read_log, root_cause, tail
from kvpp_connect.errors import KvppError

_POLL_S = 0.05
_KILL_WAIT_S = 2.0
_KILL_ATTEMPTS = 3
_LINES_BESIDE = 10


class ServerError(KvppError):
    """A server that failed: the message is one line, `log_tail` holds the last log lines.

    Args:
        beside: logs of servers that may have had a part in it; their last lines follow.
    """

    def __init__(
        self, server: str, what: str, *, log_path: Path, beside: Sequence[Path] = ()
    ) -> None:
        text = read_log(log_path)
        self.server = server
        self.log_path = log_path
        others = (f"--- {p.name}\n{tail(read_log(p), lines=_LINES_BESIDE)}" for p in beside)
        self.log_tail = "\n".join((tail(text), *others))
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
    orderly_end_s: float = 15.0  # after SIGTERM, before SIGKILL, where the parent has died
    scratch_pattern: str = ""  # regex of file names in the log that the program may leave behind
    folder_variable: str = ""  # environment variable that names a folder, removed at the end


class ServerProcess:
    """A started Launch."""

    def __init__(self, launch: Launch, *, log_path: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self._popen: subprocess.Popen[bytes] | None = None
        self._leader_exit_code: int | None = None
        self._folder: str | None = None

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return self.launch.name

    def start(self) -> None:
        """Start the program; its output goes to the log file."""
        isolated = (sys.executable, "-I", "-S", guard.__file__)
        settings = (str(os.getpid()), str(self.launch.orderly_end_s))
        env = {**os.environ, **self.launch.env}
        if self.launch.folder_variable:
            self._folder = env[self.launch.folder_variable] = tempfile.mkdtemp(prefix="kvpp-")
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [*isolated, *settings, *self.launch.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
            )

    @property
    def pid(self) -> int | None:
        """Id of the guard and of the group; None when nothing runs any more."""
        return self._popen.pid if self._popen else None

    def exit_code(self) -> int | None:
        """Exit code of the program (negative: the signal), None while it runs.

        The guard is not reaped before stop(), so its id cannot be given to a stranger while
        members of its group are still looked for.
        """
        if self._popen is not None and self._leader_exit_code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            info = os.waitid(os.P_PID, self._popen.pid, options)
            if info is not None:
                killed = info.si_code != os.CLD_EXITED
                self._leader_exit_code = -info.si_status if killed else info.si_status
        return self._leader_exit_code

    def error(self, what: str, *, beside: Sequence[Path] = ()) -> ServerError:
        """An error about this server with what its log, and those beside it, say now."""
        return ServerError(self.name, what, log_path=self.log_path, beside=beside)

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
        stop_all({self: grace_s})

    def members(self) -> tuple[int, ...]:
        """Ids of the living processes of the group, the guard's included."""
        return group_members(self.pid) if self.pid is not None else ()

    def terminate(self) -> None:
        """Ask for an orderly end."""
        if self.pid is not None:
            self._signal((self.pid,), signal.SIGTERM)

    def kill(self, *, gently: bool) -> None:
        """Kill the group; gently: all but those that clean up and end by themselves."""
        targets = self.members()
        if gently:
            targets = [p for p in targets if p != self.pid and not is_resource_tracker(p)]
        self._signal(targets, signal.SIGKILL)

    @staticmethod
    def _signal(targets: Sequence[int], number: signal.Signals) -> None:
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
        """Remove what the ended program may leave: its folder, and by names in its log."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self.launch.scratch_pattern:
            for name in set(re.findall(self.launch.scratch_pattern, read_log(self.log_path))):
                for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
                    for path in folder.glob(f"{glob.escape(name)}*"):
                        path.unlink(missing_ok=True)


def stop_all(graces_s: Mapping[ServerProcess, float]) -> None:
    """Stop several servers together: SIGTERM to each program, later SIGKILL to what is left.

    Args:
        graces_s: for each server, started or not, the time for an orderly end, in seconds.

    Raises:
        ServerError: processes survived SIGKILL.
    """
    for process in graces_s:
        process.terminate()
    left = _wait_until_gone(graces_s)
    for attempt in range(_KILL_ATTEMPTS):  # a member may fork while the others are being killed
        for process in left:
            process.kill(gently=attempt == 0)
        left = _wait_until_gone(dict.fromkeys(left, _KILL_WAIT_S))
    for process in graces_s:
        if process not in left:
            process.reap()
    if left:
        raise left[0].error(f"processes {left[0].members()} survived SIGKILL")


def _wait_until_gone(limits_s: Mapping[ServerProcess, float]) -> list[ServerProcess]:
    """Wait for groups to become empty; returns those that are not.

    Processes that outlive their leader get no more than three seconds from its end on.
    """
    begin = time.monotonic()
    limits = {process: begin + limit_s for process, limit_s in limits_s.items()}
    while True:
        waiting = [process for process in limits if process.members()]
        now = time.monotonic()
        for process in waiting:
            if process.exit_code() is not None:
                limits[process] = min(limits[process], now + ORPHANS_END_S)
        if not any(now < limits[process] for process in waiting):
            return waiting
        time.sleep(_POLL_S)
