#!/usr/bin/env bash
# Makes .venv. `bootstrap.sh demo`: what the demo needs; `bootstrap.sh docs`: what the documentation
# needs; `bootstrap.sh all`: that, tests and checks too.
# Needs git, make and python3 only. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

what=${1:-all}
case $what in
    demo) extras=demo ;;
    docs) extras=docs ;;
    all) extras=demo,postgres,test,dev,docs ;;
    *) fail "usage: scripts/bootstrap.sh [demo|docs|all]" ;;
esac

# The distribution's own Python, if it will do: it is what users have, and it is built with
# optimizations. One that pyenv compiles by default takes a quarter more processor time for the tests.
own=/usr/bin/python3
"$own" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || own=python3
python=${PYTHON:-$own}
command -v "$python" > /dev/null || fail "There is no $python here: install Python 3.10 or newer."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: gpuspawner needs Python 3.10 or newer. Name one with PYTHON=..."

# Made already, from these very files? `all` holds everything that the others do.
# The versions that the tests last passed with, so that a release elsewhere turns no run red. They
# need Python 3.11; an older one gets the newest versions that setup.cfg allows and that it can run.
constraints=constraints.txt
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || constraints=/dev/null
key=$({ cat setup.cfg pyproject.toml "$constraints" scripts/bootstrap.sh scripts/install_proxy.sh
        "$python" --version; pwd; } | sha256sum | cut -c1-32)
for stamp in .venv/.made-all ".venv/.made-$what"; do
    [ "$(cat "$stamp" 2> /dev/null)" = "$key" ] && exit 0
done

say "making the Python environment (.venv) for: $what"
if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    install_packages "python$version-venv"
fi
base='import sys; print(sys.base_prefix, sys.version)'
if ! .venv/bin/python -m pip --version > /dev/null 2>&1 ||
    [ "$(.venv/bin/python -c "$base")" != "$("$python" -c "$base")" ]; then
    "$python" -m venv --clear .venv
fi

say "installing gpuspawner and what it needs (a minute or so)"
quietly .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off \
    --constraint "$constraints" --editable ".[$extras]"

if [ "$what" != docs ]; then
    say "installing the proxy"
    quietly scripts/install_proxy.sh
fi

printf '%s' "$key" > ".venv/.made-$what"
say "the environment is ready"
