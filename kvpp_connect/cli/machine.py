"""What probes ask this machine: commands, and the packages that are installed."""

import importlib.metadata
import subprocess
from collections.abc import Callable, Iterable

COMMAND_S = 20

Run = Callable[[str], str]


def run_command(command: str) -> str:
    """What a command prints; nothing where it cannot be run, fails, or takes ``COMMAND_S``."""
    try:
        done = subprocess.run(
            command.split(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
