"""What all scenarios of `kvpp demo` have in common: options, model, ports, logs, exit codes."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.interrupt import Interrupted
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.process import ServerError
from kvpp_connect.errors import KvppError

CACHE_DIR = Path(".cache/kvpp")
_PLAIN_WIDTH = 140  # columns where the output is not a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user may choose."""

    layers: int = 6
    kv_cache_bytes: int = 200_000_000  # per rank
    timeout_s: float = 360.0  # for the whole demo
    base_port: int | None = None  # None: free ports
    log_dir: Path | None = None  # None: a temporary directory
    keep_logs: bool = False
    as_json: bool = False


def run_scenario(options: DemoOptions, run: Callable[[Path, Console], bool]) -> int:
    """Run a scenario and answer the exit code; raises nothing that a user may cause.

    Args:
        run: gets the directory for logs and the console for progress; says whether all checks hold.
    """
    progress = Console(stderr=True)
    own_log_dir = options.log_dir is None
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="kvpp-demo-"))
    code = 1
    try:
        code = 0 if run(log_dir, progress) else 1
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Interrupted) else 130
        progress.print(f"stopped by {error or 'Ctrl-C'}; no server is left", style="yellow")
    finally:
        if own_log_dir and not options.keep_logs and code != 1:
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            progress.print(f"logs: {log_dir}", soft_wrap=True)
    return code


def choose_ports(base_port: int | None, count: int) -> tuple[int, ...]:
    """Ports from ``base_port`` on, or free ones."""
    if base_port is None:
        return free_ports(count)
    return tuple(range(base_port, base_port + count))


@contextlib.contextmanager
def model_folder(spec: ModelSpec) -> Iterator[Path]:
    """The checkpoint in the cache below the current directory, or in a temporary directory."""
    path = CACHE_DIR.absolute() / f"model-{spec.digest[:12]}"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            writable = False
        else:
            writable = os.access(path.parent, os.W_OK)
        if not writable:
            folder = tempfile.TemporaryDirectory(prefix="kvpp-model-")
            path = Path(stack.enter_context(folder)) / "model"
        yield write_checkpoint(path, spec)


def result_console() -> Console:
    """Where the result goes: stdout, as wide as the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def print_problems(failures: Sequence[str], error: KvppError | None, console: Console) -> None:
    """Say what is wrong: checks that do not hold, and what kept the scenario from its end."""
    for failure in failures:
        console.print(f"check failed: {failure}", style="bold red", markup=False, soft_wrap=True)
    if error is None:
        return
    if isinstance(error, ServerError) and error.log_tail:
        console.print(f"--- last lines of {error.log_path}", markup=False, soft_wrap=True)
        console.print(error.log_tail, markup=False, highlight=False, soft_wrap=True)
        console.print("---")
    console.print(f"failed: {error}", style="bold red", markup=False, soft_wrap=True)
