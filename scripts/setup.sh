#!/usr/bin/env bash
# Makes .venv as requirements/cpu.lock says, with this project installed editable and the stores of
# requirements/stores.lock where they run, and installs the system libraries that Mooncake loads. A
# second run finds its stamp and does nothing.
#
# The stamp is removed before the first change and written after the last one. A .venv without a
# stamp (half-made, or made by hand), or one made in another folder, is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

me=setup
venv=.venv
lock=requirements/cpu.lock
stores=requirements/stores.lock # not for every Python and C library: their tests are skipped then
stamp=$venv/.kvpp-setup
log=.cache/setup.log

source scripts/setup_tools.sh

state="$PWD $(cat "$lock" "$stores" pyproject.toml scripts/setup.sh scripts/setup_tools.sh | sha256sum)"
packages_missing_for() { # the Debian packages whose library PYTHON cannot load
    "$1" -IS - <<'PYTHON'
import ctypes
for library, package in {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
PYTHON
}

up_to_date() {
    [[ -f $stamp && $(<"$stamp") == "$state" ]] && missing=$(packages_missing_for "$venv/bin/python") &&
        [[ -z $missing ]]
}
if up_to_date 2>/dev/null; then exit; fi

wait_for_others
if up_to_date 2>/dev/null; then exit; fi

[[ $(uname -sm) == "Linux x86_64" ]] ||
    die "the pinned CPU stack is for Linux x86_64, and this machine is $(uname -sm)"

python=
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
    then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || die \
    "needs Python >= 3.11 with its venv module, and found: $("${PYTHON:-python3}" --version 2>&1 || true)" \
    "install one (Debian 12: apt-get install python3.11-venv) or name one: PYTHON=/path/to/python make setup"

missing=$(packages_missing_for "$python" | xargs)
if [[ -n $missing ]]; then
    install="apt-get update && apt-get install --yes --no-install-recommends $missing"
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null ||
        die "Mooncake needs system libraries that are missing; as root, run: $install"
    say "installing Debian packages: $missing"
    DEBIAN_FRONTEND=noninteractive bash -c "$install" >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; die "this failed: $install"; }
fi

started=$SECONDS
: >"$log"
if [[ -f $stamp && $(<"$stamp") == "$PWD "* ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1
then
    say "bringing $venv in line with $lock"
    rm "$stamp"
else
    say "creating $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

install_locked "$lock"

say "installing pool stores for the tests"
pip_install --only-binary :all: --requirement "$stores" ||
    say "could not install $(grep == "$stores" | xargs) ($log): their tests will be skipped"

mapfile -t foreign < <("$venv/bin/python" -m pip list --format=freeze 2>/dev/null |
    sed 's/==.*//' | tr 'A-Z_' 'a-z-' | grep -vx -e pip -e kvpp-connect | sort |
    comm -23 - <(sed -n 's/==.*//p' "$lock" "$stores" | sort))
if ((${#foreign[@]})); then
    say "removing what the lock does not name: ${foreign[*]}"
    "$venv/bin/python" -m pip uninstall --yes "${foreign[@]}" >>"$log" 2>&1
fi

install_project
"$venv/bin/python" -c 'import mooncake.engine' || die "Mooncake does not load (see above)"

echo "$state" >"$stamp"
say "done in $((SECONDS - started)) s"
