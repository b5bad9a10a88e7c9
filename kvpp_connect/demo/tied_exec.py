"""Become another program that is told to end when the process that started it dies.

Usage: python tied_exec.py PARENT_PID PROGRAM [ARGUMENT...]

A file of its own, run by path, so that the request is made between fork and exec without running
Python code in a forked copy of a threaded process. Linux only; elsewhere it just executes.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGTERM at the parent's death, then execute the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was made
            sys.exit(f"the process {parent} that wanted {program[0]} is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
