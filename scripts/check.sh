#!/usr/bin/env bash
# Style, types, layers, known weaknesses, secrets: what can be said of the code without running it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
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

if [ ${#failed[@]} -ne 0 ]; then
    printf '\nThese checks failed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nAll checks passed.\n'
