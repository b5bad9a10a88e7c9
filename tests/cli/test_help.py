"""What the command line promises about itself."""

import json
import resource
import subprocess
import sys

import pytest
from planning_tools import EXAMPLES

COMMANDS = ("audit", "plan", "capacity", "config", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_a_worked_example(kvpp, command):
    done = kvpp(command, "--help")
    assert done.code == 0
    assert f"$ kvpp {command} " in done.stdout
    assert "Example: " in done.stdout


def test_completion_can_be_installed(kvpp):
    assert "--install-completion" in kvpp("--help").stdout


@pytest.mark.distributed
def test_completion_completes():
    done = subprocess.run(
        [sys.executable, "-m", "kvpp_connect.cli.main"],
        env={"_KVPP_COMPLETE": "complete_bash", "COMP_WORDS": "kvpp ca", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "capacity" in done.stdout


def cpu_seconds_of_children():
    """What ended children have used; a machine that stalls adds nothing to it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.distributed
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "DeepSeek-R1", "--tp", "8", "--json"),
        ("plan", "GLM-5", "--tp", "8", "--kv-memory", "40GiB", "--json"),
        ("config", "multi", "--tp", "8", "--master-address", "10.0.0.5:50051", "--json"),
    ],
)
def test_an_answer_needs_neither_torch_nor_vllm_and_about_a_second(arguments):
    code = (
        "import sys\nfrom kvpp_connect.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'mooncake', 'transformers', 'zmq', 'kvpp_connect.demo'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    before = cpu_seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    # The keys of P/D's control channel are made by zmq.
    assert done.stderr in ("[]\n", "['zmq']\n" if arguments[0] == "config" else "")
    assert json.loads(done.stdout)["command"] == arguments[0]
    # Well under a second on an idle machine; generous, because the tests' machine is not.
    assert cpu_seconds_of_children() - before < 5
