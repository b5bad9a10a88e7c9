"""Each number of the documentation is what a command prints, today."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
from planning_tools import NAMES

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def script():
    """The script that fills the pages; scripts are no package."""
    place = importlib.util.spec_from_file_location("examples", ROOT / "scripts/docs_examples.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_console_blocks_are_what_the_commands_print(path, script, monkeypatch):
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    page = path.read_text()
    assert script.render(page, script.run_here) == page, "run `python scripts/docs_examples.py`"


def test_the_planning_page_runs_all_six_models():
    page = (ROOT / "docs" / "planning.md").read_text()
    for name in NAMES:
        assert re.search(rf"^\$ kvpp plan {re.escape(name)} ", page, re.MULTILINE)


def worked_lines():
    page = (ROOT / "docs" / "planning.md").read_text()
    for block in re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()


WORKED = list(worked_lines())


@pytest.mark.parametrize("line", WORKED)
def test_the_arithmetic_is_right(line):
    left, _, right = line.rpartition(" = ")
    value = eval(left.replace(",", ""), {"ceil": math.ceil})  # numbers of our own page
    decimals = len(right.partition(".")[2])
    assert f"{value:,.{decimals}f}" == right


@pytest.mark.parametrize("line", WORKED)
def test_the_arithmetic_ends_in_a_number_of_a_command(line):
    page = (ROOT / "docs" / "planning.md").read_text()
    printed = "\n".join(re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    result = line.rpartition(" = ")[2]
    # Small examples in the text that no command of the page is run for.
    elsewhere = {"0.75"}
    assert result in elsewhere or re.search(rf"(?<![\d,.]){re.escape(result)}(?![\d,])", printed)


def test_every_key_of_the_documents_is_described(kvpp):
    page = (ROOT / "docs" / "json.md").read_text()
    described = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    documents = [
        kvpp("audit", "DeepSeek-R1", "--tp", "8", "--dcp", "3", "--json").document,
        kvpp(
            *("plan", "DeepSeek-R1", "--tp", "8", "--kv-memory", "40GiB", "--json"),
            *("--batch", "1", "--context", "100", "--link", "1GB/s", "--layer-time", "1ms"),
        ).document,
        kvpp(
            *("capacity", "plain.log", "kvpp.log", "--config", "tiny", "--json"),
            *("--tp", "2", "--device", "cpu", "--dtype", "float32"),
        ).document,
    ]
    assert set().union(*map(keys, documents)) - described == set()


def keys(value):
    """All keys of nested objects."""
    if isinstance(value, list):
        return set().union(*map(keys, value)) if value else set()
    if isinstance(value, dict):
        return set(value) | set().union(set(), *map(keys, value.values()))
    return set()
