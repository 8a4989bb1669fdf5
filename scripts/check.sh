#!/usr/bin/env bash
# Style, types and layers: everything that can be said about the code without running it.
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

if [ ${#failed[@]} -ne 0 ]; then
    printf '\nThese checks failed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nAll checks passed.\n'
