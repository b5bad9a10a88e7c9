#!/usr/bin/env bash
# Builds the documentation pages into .cache/site; a warning is an error. The tools live in an
# environment of their own, as requirements/docs.lock says.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.cache/docs-venv
lock=requirements/docs.lock
stamp=$venv/.kvpp-docs
state="$PWD $(sha256sum <"$lock")"

mkdir -p .cache
exec 9>.cache/docs.lock
flock 9
if [[ ! -f $stamp || $(<"$stamp") != "$state" ]]; then
    echo "docs: installing $(grep -c == "$lock") pinned packages"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps \
        --only-binary :all: --requirement "$lock" >.cache/docs.log 2>&1 ||
        { tail -n 20 .cache/docs.log >&2; exit 1; }
    echo "$state" >"$stamp"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --quiet --clean --strict
echo "docs: .cache/site/index.html"
