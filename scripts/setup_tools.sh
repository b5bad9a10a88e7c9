# What the set-up scripts share. They set `me`, the name that they go by, and `log`; those that make
# a virtual environment set `venv` too. Sourced, never run.

torch_index=https://download.pytorch.org/whl/cpu # asked for torch alone, and only if need be

say() { echo "$me: $*"; }
die() { printf "$me: %s\n" "$@" >&2; exit 1; }
trap 'die interrupted' INT TERM HUP # pip turns Ctrl-C into a mere failure

wait_for_others() { # in this folder
    mkdir -p .cache
    exec 9>".cache/$me.lock"
    flock --nonblock 9 || { say "waiting for another set-up in this folder"; flock 9; }
}

pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps "$@" >>"$log" 2>&1; }
pip_failed() { tail -n 20 "$log" >&2; die "pip could not install $1 (all of its output: $log)"; }

install_locked() { # install_locked LOCK
    local torch
    torch=$(grep '^torch==' "$1")
    say "installing $torch"
    if ! pip_install --only-binary :all: "$torch"; then
        say "the configured package sources do not have it: asking PyTorch's own index"
        pip_install --only-binary :all: --index-url "$torch_index" "$torch" || pip_failed "$torch"
    fi
    say "installing $(grep -c == "$1") pinned packages (a few minutes, about 450 MB to download)"
    pip_install --only-binary :all: --requirement "$1" || pip_failed "$1"
}

install_project() {
    say "installing kvpp-connect (editable)"
    pip_install --no-build-isolation --editable . || pip_failed kvpp-connect
}
