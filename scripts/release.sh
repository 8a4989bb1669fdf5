#!/usr/bin/env bash
# Everything of a release up to the upload, into dist/: changelog, wheels, sdists, bills of materials and
# hashes. Both wheels are tried in a clean environment of each Python that is here. Nothing is
# committed, tagged or sent.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
bin=$(dirname "$python")
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' gpuspawner/__init__.py)
date=$(git log -1 --format=%cs)

[ -z "$(git status --porcelain)" ] ||
    fail "There are changes that are not committed, and a release is made from a commit. See: git status"
tagged=$(git rev-parse --quiet --verify "refs/tags/v$version^{commit}") || tagged=
fragments=$(git ls-files 'changes/*.md')
if [ -n "$tagged" ] && [ "$tagged" != "$(git rev-parse HEAD)" ]; then
    fail "Version $version has a tag, v$version, on another commit. Write the next version into gpuspawner/__init__.py, and commit it."
fi
if [ -n "$tagged" ] && [ -n "$fragments" ]; then
    fail "The tag v$version is on a commit that still has fragments in changes/. Remove the tag, and write the changelog first."
fi
if [ -z "$fragments" ] && ! grep -q "^## $version (" docs/changelog.md; then
    fail "There is nothing to release: no fragment in changes/, and no $version in docs/changelog.md."
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/dist
mkdir "$out" "$work/empty"

say "writing the changelog of $version"
git archive HEAD pyproject.toml changes docs/changelog.md | tar -x -C "$work"
[ -z "$fragments" ] || quietly "$bin/towncrier" build --yes --dir "$work" --version "$version" --date "$date"
cp "$work/docs/changelog.md" "$out/changelog.md"

say "building wheels and sdists"
PYTHON=$python scripts/build_dists.sh "$out"

# pyenv puts every Python on PATH, and starts only those that it is asked for.
if command -v pyenv > /dev/null; then
    PYENV_VERSION=$(pyenv versions --bare | grep -E '^3\.(10|11|12|13)\.' | paste -sd:)
    export PYENV_VERSION
fi
tried=() missing=() newest=
for number in 3.10 3.11 3.12 3.13; do
    if found=$("$bin/uv" python find --no-python-downloads --no-project --system "$number" 2> /dev/null); then
        tried+=("$number")
        newest=$found
    else
        missing+=("$number")
    fi
done
[ ${#tried[@]} -ne 0 ] || fail "There is no Python from 3.10 to 3.13 here to try the wheels with."

# Not from .venv: cyclonedx-bom needs a newer jsonschema than the tests, and pip must know each Python.
say "installing pip and cyclonedx-bom"
"$newest" -m venv "$work/tools"
quietly "$work/tools/bin/pip" install --upgrade pip 'cyclonedx-bom>=7'

# install ENVIRONMENT REQUIREMENT...: from the index, but for the wheels that were built here.
install() {
    local venv=$1
    shift
    quietly "$work/tools/bin/pip" --python "$venv" install --find-links "$out" "$@"
    quietly "$work/tools/bin/pip" --python "$venv" check
}
# environment PYTHON NAME: a new environment $venv with one of the distributions, and for the newest
# Python, its bill of materials.
environment() {
    venv=$work/venv
    "$1" -m venv --clear --without-pip "$venv"
    install "$venv" "$2==$version"
    [ "$1" != "$newest" ] || quietly "$work/tools/bin/cyclonedx-py" environment --output-reproducible \
        --output-file "$out/${2//-/_}-$version.cdx.json" "$venv/bin/python"
}
try_hub() {
    cd "$work/empty"
    [ "$("$venv/bin/gpuspawner" --version)" = "gpuspawner $version" ]
    "$venv/bin/gpuspawner" --help
    "$venv/bin/gpuspawner" init --defaults --diff --prefix "$work/empty"
    # The directory's authenticator and TLJH's plugin need extras.
    "$venv/bin/python" -c 'if True:
        from importlib.metadata import distribution
        for point in distribution("gpuspawner").entry_points:
            if point.name != "gpu-members-ldap" and point.group != "tljh":
                print(point.load())'
}
try_lab() {
    "$venv/bin/gpuspawner-run" --help
    "$venv/bin/jupyter" labextension list 2>&1 | grep "gpuspawner .*enabled.*OK.*(python, gpuspawner-lab)"
    "$venv/bin/jupyter" server extension list 2>&1 | tee "$work/extensions"
    [ "$(grep -c "gpuspawner_.*OK" "$work/extensions")" -eq 4 ]
}
for number in "${tried[@]}"; do
    say "trying gpuspawner and gpuspawner-lab with Python $number"
    each=$("$bin/uv" python find --no-python-downloads --no-project --system "$number")
    environment "$each" gpuspawner
    quietly bash -euo pipefail -c "$(declare -p version venv work); $(declare -f try_hub); try_hub"
    environment "$each" gpuspawner-lab
    install "$venv" 'jupyterlab>=4'
    quietly bash -euo pipefail -c "$(declare -p version venv work); $(declare -f try_lab); try_lab"
done

(cd "$out" && sha256sum -- * > SHA256SUMS)
rm -rf dist
mv "$out" dist
say "dist/ holds version $version of commit $(git rev-parse --short HEAD):"
(cd dist && cat SHA256SUMS)
echo "Both wheels work with Python ${tried[*]}.${missing[*]:+ Not here, so not tried: ${missing[*]}.}"
if [ -n "$tagged" ]; then
    printf '\nThe files are those of tag v%s. Next, send the tag and the files:\n    git push origin v%s\n    twine upload dist/*.whl dist/*.tar.gz\n' "$version" "$version"
else
    printf '\nThis was a rehearsal. To release, type:\n'
    [ -z "$fragments" ] || printf '    .venv/bin/towncrier build --yes --version %s\n    git commit -am "Release %s"\n' "$version" "$version"
    printf '    git tag -a v%s -m %s\n    make release\n' "$version" "$version"
fi
