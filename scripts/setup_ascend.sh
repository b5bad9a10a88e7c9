#!/usr/bin/env bash
# Makes .venv-ascend as requirements/ascend.lock says, with this project installed editable: the
# released vllm-ascend on a CPU, for tests/ascend. A second run finds its stamp and does nothing.
# The stamp is removed before the first change and written after the last one. Where only this project
# has changed since, the packages stay.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-ascend
lock=requirements/ascend.lock
stamp=$venv/.kvpp-setup
log=.cache/setup-ascend.log
torch_index=https://download.pytorch.org/whl/cpu # asked for torch alone, and only if need be

say() { echo "setup-ascend: $*"; }
die() { printf 'setup-ascend: %s\n' "$@" >&2; exit 1; }
trap 'die interrupted' INT TERM HUP # pip turns Ctrl-C into a mere failure

packages="$PWD $(cat "$lock" scripts/setup_ascend.sh | sha256sum)"
state="$packages $(sha256sum <pyproject.toml)"
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$state" ]]; }
if up_to_date; then exit; fi

mkdir -p .cache
exec 9>.cache/setup-ascend.lock
flock --nonblock 9 || { say "waiting for another set-up in this folder"; flock 9; }
if up_to_date; then exit; fi

[[ $(uname -sm) == "Linux x86_64" ]] ||
    die "the pinned stack is for Linux x86_64, and this machine is $(uname -sm)"

python=${PYTHON:-python3.11} # the wheel of vllm-ascend is for no other
"$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "needs Python 3.11 with its venv module, and found: $("$python" --version 2>&1 || true)" \
        "install it, or name it: PYTHON=/path/to/python3.11 make test-ascend"

pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps "$@" >>"$log" 2>&1; }
pip_failed() { tail -n 20 "$log" >&2; die "pip could not install $1 (all of its output: $log)"; }

started=$SECONDS
: >"$log"
if [[ -f $stamp && $(<"$stamp") == "$packages "* ]]; then
    rm "$stamp"
else
    say "creating $venv with $("$python" --version) (2.6 GiB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    torch=$(grep '^torch==' "$lock")
    say "installing $torch"
    if ! pip_install --only-binary :all: "$torch"; then
        say "the configured package sources do not have it: asking PyTorch's own index"
        pip_install --only-binary :all: --index-url "$torch_index" "$torch" || pip_failed "$torch"
    fi
    say "installing $(grep -c == "$lock") pinned packages (a few minutes, about 450 MB to download)"
    pip_install --only-binary :all: --requirement "$lock" || pip_failed "$lock"
fi

say "installing kvpp-connect (editable)"
pip_install --no-build-isolation --editable . || pip_failed kvpp-connect
"$venv/bin/python" -c 'import mooncake.engine' ||
    die "Mooncake does not load (see above); make setup installs its system libraries"

echo "$state" >"$stamp"
say "done in $((SECONDS - started)) s"
