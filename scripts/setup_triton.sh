#!/usr/bin/env bash
# Unpacks requirements/triton.lock into .venv-triton, a folder of packages and no environment: only
# tests of model runner V2 put it on PYTHONPATH. A second run finds its stamp and does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

me=setup-triton
folder=.venv-triton
lock=requirements/triton.lock
stamp=$folder/.kvpp-setup
log=.cache/setup-triton.log

source scripts/setup_tools.sh

[[ -x .venv/bin/python ]] || die "needs .venv first: make setup"
# The wheel is for one version of Python.
state="$(.venv/bin/python -V) $(sha256sum <"$lock")"
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$state" ]]; }
if up_to_date; then exit; fi

wait_for_others
if up_to_date; then exit; fi

say "unpacking $(grep == "$lock") into $folder (about 290 MB to download, 1 GB on disk)"
rm -rf "$folder"
.venv/bin/python -m pip --disable-pip-version-check install --no-deps --only-binary :all: \
    --target "$folder" --requirement "$lock" >"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; die "pip could not install $lock (all of its output: $log)"; }
echo "$state" >"$stamp"
