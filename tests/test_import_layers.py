"""What may be loaded by whom, seen from outside."""

import subprocess
import sys

import pytest


def loaded(statement, *names):
    code = f"{statement}\nimport sys\nprint([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "module",
    ["layout", "config", "errors", "platforms.base", "planning.plan", "planning.compare"],
)
def test_planning_loads_neither_torch_nor_vllm(module):
    assert loaded(f"import kvpp_connect.{module}", "torch", "vllm", "mooncake") == "[]"


@pytest.mark.parametrize(
    "module", ["wire", "transfer_plan", "metadata", "leases", "control", "consumer", "config"]
)
def test_the_connectors_pure_parts_load_neither_torch_nor_vllm(module):
    statement = f"import kvpp_connect.connectors.mooncake_v2.{module}"
    assert loaded(statement, "torch", "vllm", "mooncake.engine") == "[]"


def test_the_plugin_module_imports_nothing_heavy():
    assert loaded("import kvpp_connect.plugin", "torch", "vllm") == "[]"


def test_the_command_line_answers_without_torch_and_vllm():
    assert loaded("import kvpp_connect.cli.main", "torch", "vllm") == "[]"
