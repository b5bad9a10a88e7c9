#!/usr/bin/env bash
# Unpacks requirements/triton.lock into .venv-triton, a folder of packages and no environment: only
# tests of model runner V2 put it on PYTHONPATH. A second run finds its stamp and does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.venv-triton
lock=requirements/triton.lock
stamp=$folder/.kvpp-setup
log=.cache/setup-triton.log

say() { echo "setup-triton: $*"; }
die() { printf 'setup-triton: %s\n' "$@" >&2; exit 1; }
trap 'die interrupted' INT TERM HUP # pip turns Ctrl-C into a mere failure

[[ -x .venv/bin/python ]] || die "needs .venv first: make setup"
# The wheel is for one version of Python.
state="$(.venv/bin/python -V) $(sha256sum <"$lock")"
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$state" ]]; }
if up_to_date; then exit; fi

mkdir -p .cache
exec 9>.cache/setup-triton.lock
flock --nonblock 9 || { say "waiting for another set-up in this folder"; flock 9; }
if up_to_date; then exit; fi

say "unpacking $(grep == "$lock") into $folder (about 290 MB to download, 1 GB on disk)"
rm -rf "$folder"
.venv/bin/python -m pip --disable-pip-version-check install --no-deps --only-binary :all: \
    --target "$folder" --requirement "$lock" >"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; die "pip could not install $lock (all of its output: $log)"; }
echo "$state" >"$stamp"
