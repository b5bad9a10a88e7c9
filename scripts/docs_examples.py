"""Fill the console blocks of the documentation with what the commands print.

    python scripts/docs_examples.py

A block is filled where its first line starts with "$ kvpp". The commands run beside the
checkpoints and logs of tests/examples; a test compares the pages with a fresh run.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kvpp_connect.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "tests" / "examples"
_BLOCK = re.compile(
    r"^```console\n(?P<command>\$ kvpp (?:.*\\\n)*.*)\n(?:.*\n)*?```$", re.MULTILINE
)


def render(page: str, run: Callable[[str], str]) -> str:
    """The page with every console block filled anew.

    Args:
        run: from a command line, without "$ ", to its output.
    """

    def fill(block: re.Match[str]) -> str:
        command = block["command"]
        output = run(command.removeprefix("$ ").replace("\\\n", " "))
        return f"```console\n{command}\n{output}```"

    return _BLOCK.sub(fill, page)


def run_here(command: str) -> str:
    """Run one `kvpp` command line in this process and return what it prints."""
    output, before = io.StringIO(), os.getcwd()
    argv, sys.argv = sys.argv, shlex.split(command)
    os.chdir(EXAMPLES)
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            cli.main()
    finally:
        os.chdir(before)
        sys.argv = argv
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def main() -> None:
    """Rewrite the pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = path.read_text()
        filled = render(page, run_here)
        if filled != page:
            path.write_text(filled)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
