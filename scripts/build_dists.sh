#!/usr/bin/env bash
# build_dists.sh FOLDER: the wheels and sdists of the last commit, with the same bytes whoever builds
# them, wherever and whenever. Needs no network.
set -euo pipefail
out=$(realpath "$1")
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")

umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
git -c tar.umask=0022 archive HEAD | tar -x -C "$work"

for folder in "$work" "$work/images/common/lab"; do
    "$python" -m build --no-isolation --outdir "$out" "$folder" > "$work/log" 2>&1 ||
        { tail -n 40 "$work/log" >&2; exit 1; }
done

# setuptools writes the time and the user into an sdist.
for sdist in "$out"/*.tar.gz; do
    name=$(basename "$sdist" .tar.gz)
    tar -x -C "$work" -f "$sdist"
    tar -c -C "$work" --sort=name --format=posix --pax-option='exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime' \
        --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner "$name" | gzip -n9 > "$sdist"
done
