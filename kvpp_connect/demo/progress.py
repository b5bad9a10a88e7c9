"""Showing what happens while servers start: a live table on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvpp_connect.demo.fleet import Progress, ServerStatus, State

_STYLES = {State.STARTING: "yellow", State.READY: "green", State.FAILED: "bold red"}


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A progress callback for Fleet.start().

    Only the calling thread draws, so a process may be started while the display is up.
    """
    if not console.is_terminal:
        yield _LinePrinter(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda statuses: live.update(_render(statuses), refresh=True)


class _LinePrinter:
    """Prints a line whenever the state of a server changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, State] = {}

    def __call__(self, statuses: tuple[ServerStatus, ...]) -> None:
        for status in statuses:
            if self._seen.get(status.name) is not status.state:
                self._seen[status.name] = status.state
                self._console.print(_line(status))


def _render(statuses: tuple[ServerStatus, ...]) -> Group:
    return Group(*(_line(status) for status in statuses))


def _line(status: ServerStatus) -> Text:
    line = Text(f"  {status.name:12} ")
    line.append(f"{status.state.value:9}", style=_STYLES[status.state])
    return line.append(f"{status.elapsed_s:5.1f} s")
