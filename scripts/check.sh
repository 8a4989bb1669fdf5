#!/usr/bin/env bash
# Style, types, layers, known weaknesses, secrets, and that every test can be collected.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
}
# mypy takes as long as all other checks together, so it runs beside them.
types=$(mktemp)
mypy > "$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2> /dev/null; rm -f "$types"' EXIT

check ruff check .
check ruff format --check .
check lint-imports
# Each package that is imported is declared in setup.cfg.
check fawltydeps --check-undeclared --code gpuspawner --deps setup.cfg
# Not asked: asserts, which are for the type checker (B101), and programs that are started by a list
# of words, found on PATH (B404, B603, B607). A shell is always asked about. Each other exception is
# a "nosec" in its line, which says why.
weaknesses() {
    bandit -q -r gpuspawner scripts hub_config images -s B101,B404,B603,B607 \
        2> >(grep -v 'nosec encountered' >&2)
}
check weaknesses
check python scripts/scan_secrets.py
# This compiles every module once, so that the processes of a test run need not.
tests_can_be_collected() {
    local output
    output=$(python -m pytest --collect-only -qq 2>&1) || { printf '%s\n' "$output"; return 1; }
}
check tests_can_be_collected

printf '\n== mypy\n'
wait "$mypy" || failed+=(mypy)
cat "$types"

if [ ${#failed[@]} -ne 0 ]; then
    printf '\nThese checks failed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nAll checks passed.\n'
