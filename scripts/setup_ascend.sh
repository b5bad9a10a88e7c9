#!/usr/bin/env bash
# Makes .venv-ascend as requirements/ascend.lock says, with this project installed editable: the
# released vllm-ascend on a CPU, for tests/ascend. A second run finds its stamp and does nothing.
# The stamp is removed before the first change and written after the last one. Where only this project
# has changed since, the packages stay.
set -euo pipefail
cd "$(dirname "$0")/.."

me=setup-ascend
venv=.venv-ascend
lock=requirements/ascend.lock
stamp=$venv/.kvpp-setup
log=.cache/setup-ascend.log

source scripts/setup_tools.sh

packages="$PWD $(cat "$lock" scripts/setup_ascend.sh scripts/setup_tools.sh | sha256sum)"
state="$packages $(sha256sum <pyproject.toml)"
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$state" ]]; }
if up_to_date; then exit; fi

wait_for_others
if up_to_date; then exit; fi

[[ $(uname -sm) == "Linux x86_64" ]] ||
    die "the pinned stack is for Linux x86_64, and this machine is $(uname -sm)"

python=${PYTHON:-python3.11} # the wheel of vllm-ascend is for no other
"$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "needs Python 3.11 with its venv module, and found: $("$python" --version 2>&1 || true)" \
        "install it, or name it: PYTHON=/path/to/python3.11 make test-ascend"

started=$SECONDS
: >"$log"
if [[ -f $stamp && $(<"$stamp") == "$packages "* ]]; then
    rm "$stamp"
else
    say "creating $venv with $("$python" --version) (2.6 GiB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    install_locked "$lock"
fi

install_project
"$venv/bin/python" -c 'import mooncake.engine' ||
    die "Mooncake does not load (see above); make setup installs its system libraries"

echo "$state" >"$stamp"
say "done in $((SECONDS - started)) s"
