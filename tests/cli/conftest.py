"""Runs `kvpp` in this process, as its console script does."""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from planning_tools import EXAMPLES

from kvpp_connect.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self):
        return json.loads(self.stdout)


@contextmanager
def inside(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture
def kvpp(capsys, monkeypatch):
    """Runs one command line beside the six checkpoints."""
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvpp", *map(str, arguments)])
        with inside(EXAMPLES), pytest.raises(SystemExit) as ended:
            main.main()
        captured = capsys.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)

    return run
