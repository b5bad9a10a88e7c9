"""Several servers started together, and all of them stopped on every way out.

    with Fleet(log_dir) as fleet:
        prefill, decode = fleet.start([...], timeout_s=120)
        ...

Everything runs in the calling thread. A busy port, a program that ends early and one that never
becomes healthy raise an error that says which server it was. Ctrl-C, SIGTERM and SIGHUP raise
Interrupted inside the `with` block. After the block no process of any server is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpp_connect.demo.interrupt import SignalGuard
from kvpp_connect.demo.local_http import is_healthy
from kvpp_connect.demo.logs import read_log, root_cause
from kvpp_connect.demo.ports import LOOPBACK, check_ports_free
from kvpp_connect.demo.process import Launch, ServerError, ServerProcess, stop_all
from kvpp_connect.errors import ConfigError

_POLL_S = 0.2
_DYING_S = 2.0
_UNREADY_GRACE_S = 3.0


class State(Enum):
    """Where a server stands."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One line of a progress display."""

    name: str
    state: State
    elapsed_s: float  # since the start; until it was ready where it is


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has answered its health check."""

    process: ServerProcess
    startup_s: float

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return self.process.name

    @property
    def url(self) -> str:
        """Base URL without a slash at the end."""
        return f"http://{LOOPBACK}:{self.process.launch.port}"


Progress = Callable[[tuple[ServerStatus, ...]], None]


class Fleet:
    """Context manager that owns servers; see the module docstring."""

    def __init__(self, log_dir: Path, *, stop_grace_s: float = 15.0) -> None:
        self._log_dir = log_dir
        self._stop_grace_s = stop_grace_s
        self._processes: list[ServerProcess] = []
        self._ready: dict[ServerProcess, RunningServer] = {}
        self._signals = SignalGuard()

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._signals.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all servers, whatever happened."""
        self._signals.close()
        try:
            stop_all({process: self._grace_s(process) for process in self._processes})
        finally:
            self._processes = []
            self._signals.leave()

    def start(
        self,
        launches: Sequence[Launch],
        *,
        timeout_s: float,
        progress: Progress = lambda _: None,
    ) -> tuple[RunningServer, ...]:
        """Start servers in parallel and wait until all are healthy.

        Args:
            launches: their names must be new to this fleet.
            timeout_s: limit for all of them together, in seconds.
            progress: called a few times per second with the state of each.

        Raises:
            ConfigError: a port is busy or a name is taken; nothing has been started then.
            ServerError: a server ended or was not healthy in time.
        """
        self._check_names(launches)
        check_ports_free(
            (launch.name, port)
            for launch in launches
            for port in (launch.port, *launch.other_ports)
        )
        fresh = [ServerProcess(x, log_path=self._log_dir / f"{x.name}.log") for x in launches]
        begin = time.monotonic()
        for process in fresh:
            self._processes.append(process)
            process.start()
        return self._wait_until_ready(fresh, begin, timeout_s, progress)

    def check(self) -> None:
        """Raise ServerError if any server has ended."""
        for process in self._processes:
            process.check_running()

    def explain(self, what: str, *, suspect: RunningServer) -> ServerError:
        """An error for a request that failed, blamed on the server that most probably caused it.

        That is one that has ended, else one whose log names a cause, else `suspect`.
        """
        limit = time.monotonic() + _DYING_S
        while time.monotonic() < limit:  # connections break a little before the process is gone
            try:
                self.check()
            except ServerError as error:
                return error
            time.sleep(_POLL_S)
        for process in self._processes:
            if root_cause(read_log(process.log_path)):
                return process.error(what)
        others = [p.log_path for p in self._processes if p is not suspect.process]
        return suspect.process.error(what, beside=others)

    def _grace_s(self, process: ServerProcess) -> float:
        """A server that has never been ready has nothing to finish; vLLM ignores SIGTERM then."""
        ready = process in self._ready
        return self._stop_grace_s if ready else min(self._stop_grace_s, _UNREADY_GRACE_S)

    def _check_names(self, launches: Sequence[Launch]) -> None:
        names = [process.name for process in self._processes]
        for launch in launches:
            if launch.name in names:
                raise ConfigError(f"two servers are called {launch.name!r}: log files would clash")
            names.append(launch.name)

    def _wait_until_ready(
        self, fresh: list[ServerProcess], begin: float, timeout_s: float, progress: Progress
    ) -> tuple[RunningServer, ...]:
        ready = self._ready
        while True:
            elapsed_s = time.monotonic() - begin
            try:
                self.check()
            except ServerError:
                progress(_statuses(fresh, ready, elapsed_s))
                raise
            for process in fresh:
                launch = process.launch
                if process not in ready and is_healthy(
                    f"http://{LOOPBACK}:{launch.port}{launch.health_path}"
                ):
                    ready[process] = RunningServer(process, time.monotonic() - begin)
            progress(_statuses(fresh, ready, elapsed_s))
            if all(process in ready for process in fresh):
                return tuple(ready[process] for process in fresh)
            if elapsed_s > timeout_s:
                late = next(process for process in fresh if process not in ready)
                raise late.error(f"was not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)


def _statuses(
    fresh: list[ServerProcess], ready: dict[ServerProcess, RunningServer], elapsed_s: float
) -> tuple[ServerStatus, ...]:
    statuses = []
    for process in fresh:
        state, seconds = State.STARTING, elapsed_s
        if process in ready:
            state, seconds = State.READY, ready[process].startup_s
        if process.exit_code() is not None:
            state = State.FAILED
        statuses.append(ServerStatus(name=process.name, state=state, elapsed_s=seconds))
    return tuple(statuses)
