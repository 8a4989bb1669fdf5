"""The Dockerfiles of images/, read and not built: what every one of them has to keep.

tests/engines/test_images.py builds and tries them.
"""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import gpuspawner
from gpuspawner.catalog.editor import entry_of
from gpuspawner.catalog.loader import Catalog
from gpuspawner.engines.smoke_test import SMOKE
from tests.support.processes import REPO

IMAGES = REPO / "images"
NAMES = ["base", "jax", "minimal-cpu", "ngc", "pytorch", "rapids", "tensorflow", "vscode"]
OPTION = "keep-outputs"
"""Built on any of them that has a lock."""
ON_BASE = "gpuspawner/base:latest"


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile with what follows it, on one line."""
    lines = (IMAGES / name / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [(w, r.strip()) for w, _, r in (x.partition(" ") for x in joined.splitlines() if x)]


def said(name: str, word: str) -> list[str]:
    return [rest for found, rest in instructions(name) if found == word]


def last_stage(name: str) -> list[tuple[str, str]]:
    found = instructions(name)
    begins = [number for number, (word, _) in enumerate(found) if word == "FROM"]
    return found[begins[-1] :]


def labels(name: str) -> dict[str, str]:
    words = [word for rest in said(name, "LABEL") for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize("name", [*NAMES, OPTION])
def test_base_image_is_a_pinned_build_argument(name: str) -> None:
    first, second = instructions(name)[:2]
    assert first[0] == "ARG" and second == ("FROM", second[1])
    assert second[1].split()[0] == "${BASE_IMAGE}"
    found = re.fullmatch(r"BASE_IMAGE=([a-z0-9/-]+):(\S+)", first[1])
    assert found, "a short name with a tag: which registry it is from, the engine decides"
    assert found[2] != "latest" or f"{found[1]}:{found[2]}" == ON_BASE
    stages = {rest.split(" AS ")[1] for rest in said(name, "FROM") if " AS " in rest}
    assert {rest.split()[0] for rest in said(name, "FROM")} <= {"${BASE_IMAGE}", *stages}


@pytest.mark.parametrize("name", [*NAMES, OPTION])
def test_images_do_not_run_as_root(name: str) -> None:
    stage = last_stage(name)
    users = [rest for word, rest in stage if word == "USER"]
    inherited = stage[0][1]
    if not users and inherited != "${BASE_IMAGE}":  # a stage of this file
        users = said(name, "USER")[:1]
    if not users:
        assert said(name, "ARG")[0] == f"BASE_IMAGE={ON_BASE}"
    else:
        assert users[-1] in ("${NB_USER}", "${NB_UID}")


@pytest.mark.parametrize("name", [*NAMES, OPTION])
def test_dockerfiles_leave_no_caches_and_fetch_no_urls(name: str) -> None:
    for word, rest in instructions(name):
        assert word != "ADD"
        assert "://" not in rest, "addresses are the engine's and pip's own matter"
        assert not re.search(r"\bcurl\b.*\||\bwget\b|\bsudo\b", rest)
        if "pip install" in rest:
            assert "--no-cache-dir" in rest and "pip install pip" not in rest
    for word, rest in last_stage(name):
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest


@pytest.mark.parametrize("name", NAMES)
def test_images_hide_gpus_and_carry_catalog_labels(name: str) -> None:
    assert any("NVIDIA_VISIBLE_DEVICES=void" in rest for rest in said(name, "ENV"))
    found = labels(name)
    assert found["org.opencontainers.image.base.name"] == "${BASE_IMAGE}"
    assert found[SMOKE + "imports"]
    entry = entry_of(f"gpuspawner/{name}:latest", found, {})
    made = Catalog.from_mapping({"environments": [entry]}).environments[0]
    assert made.slug == name
    if name != "ngc":  # what it is, its own base says
        assert made.display_name != name and made.summary
        assert found["org.opencontainers.image.licenses"]


def locked(lock: Path) -> list[str]:
    """The names of a lock file's packages."""
    return [line.partition("==")[0] for line in lock.read_text(encoding="utf-8").splitlines()[1:]]


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "ngc"), OPTION])
def test_images_install_locked_packages_only_and_list_them_in_an_sbom(name: str) -> None:
    runs = " ".join(said(name, "RUN"))
    assert "LOCK=requirements.lock" in said(name, "ARG") and "sbom.cdx.json" in runs
    installs = re.findall(r"pip install --no-cache-dir (.*?) (?:&&|\\)", runs + " &&")
    hub, lock = '"${JUPYTERHUB_REQUIREMENT}"', f'-r "/opt/gpuspawner/{name}/${{LOCK}}"'
    others = {each.removeprefix("${PIP_INDEX_ARGS} ") for each in installs} - {hub}
    assert others - {"-r /opt/gpuspawner/vscode/node.lock"} == {lock}
    assert hub not in installs or 'JUPYTERHUB_REQUIREMENT="jupyterhub"' in said(name, "ARG")


@pytest.mark.parametrize(
    "wanted", sorted(IMAGES.glob("*/*.in")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_lock_has_every_package_of_its_in_file_with_a_hash(wanted: Path) -> None:
    """`images/lock` writes it."""
    lock = wanted.with_suffix(".lock")
    first, *lines = lock.read_text(encoding="utf-8").splitlines()
    assert first.startswith("# Made by images/lock")
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[^=\s]+ --hash=sha256:[0-9a-f]{64}", line), line
    names = locked(lock)
    assert names == sorted(set(names))
    pins = dict(line.split()[0].split("==") for line in lines)
    for requirement in wanted.read_text(encoding="utf-8").splitlines():
        name, _, version = re.sub(r"\[.*\]", "", requirement).partition("==")
        assert fnmatch(pins[name], version or "*")
    if said(wanted.parent.name, "ARG")[0] == f"BASE_IMAGE={ON_BASE}":
        assert set(names).isdisjoint(locked(IMAGES / "base" / "requirements.lock"))


def build(*words: str) -> list[list[str]]:
    """The commands that images/build would run."""
    command = [sys.executable, str(IMAGES / "build"), "--dry-run", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in printed.splitlines() if line and line[0] != "["]


def test_build_script_builds_base_images_first() -> None:
    def built(*words: str) -> list[str]:
        return [command[3].split("/")[1].removesuffix(":latest") for command in build(*words)]

    assert built("jax", "vscode") == ["base", "jax", "vscode"]
    everything = built("--all")
    assert everything.index("base") < everything.index("jax")
    folders = {path.parent.name for path in IMAGES.glob("*/Dockerfile")}
    assert {*everything, "ngc", OPTION} == folders
    assert sorted({*everything, "ngc"}) == NAMES and len(everything) == len(NAMES) - 1
    command = [sys.executable, str(IMAGES / "build"), "pytorhc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("There is no images/pytorhc: base, jax,")


def test_build_script_accepts_hub_version_cpu_and_base_image() -> None:
    base, jax = build("jax", "--cpu", "--hub-version", "6.1.0")
    assert {"JUPYTERHUB_REQUIREMENT=jupyterhub==6.1.0", "LOCK=requirements.lock"} <= {*base}
    assert "LOCK=cpu.lock" in jax and "nvidia" not in (IMAGES / "jax/cpu.lock").read_text()
    base, jax = build("jax", "--cpu", "--newest")
    assert "LOCK=requirements.in" in base and "LOCK=cpu.in" in jax
    command, trial = build("ngc", "--base-image", "mine:1", "--tag", "wrapped:1", "--smoke")
    assert command[3] == "wrapped:1" and "BASE_IMAGE=mine:1" in command
    assert trial[-3:] == ["catalog", "smoke", "wrapped:1"]


def test_option_is_an_image_of_its_own_beside_the_one_without_it() -> None:
    _, jax, with_option = build("jax", "--keep-outputs")
    assert jax[3] == "gpuspawner/jax:latest"
    assert with_option[3] == "gpuspawner/jax-keep-outputs:latest"
    assert "BASE_IMAGE=gpuspawner/jax:latest" in with_option
    found = dict(word.split("=", 1) for word in with_option if word.count("=") == 1)
    entry = entry_of(with_option[3], labels("jax") | found, {})
    made = Catalog.from_mapping({"environments": [entry]}).environments[0]
    assert (made.slug, made.display_name) == ("jax-keep-outputs", "JAX, keeps outputs")
    *_, last = build("base", "jax", "--keep-outputs", "--tag", "mine:1")
    assert last[3] == "mine:1" and "BASE_IMAGE=gpuspawner/jax:latest" in last
    command = [sys.executable, str(IMAGES / "build"), "ngc", "--keep-outputs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:29]) == (2, "--keep-outputs is not for ngc")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ngc"])
def test_option_changes_no_package_of_an_image(name: str) -> None:
    """What the option brings is not in the image, or has the same version there."""

    def versions(lock: Path) -> dict[str, str]:
        lines = lock.read_text(encoding="utf-8").splitlines()[1:]
        return dict(line.split()[0].split("==") for line in lines)

    added = versions(IMAGES / OPTION / "requirements.lock")
    for lock in (IMAGES / name).glob("*.lock"):
        there = versions(lock)
        assert {k: there[k] for k in added.keys() & there} == {
            k: added[k] for k in added.keys() & there
        }


def test_sbom_lists_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bill" / "sbom.cdx.json"
    monkeypatch.setattr(sys, "argv", ["seal.py", str(file)])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(IMAGES / "common" / "seal.py"), run_name="__main__")
    assert done.value.code is None
    bill = json.loads(file.read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    references = [part["bom-ref"] for part in bill["components"]]
    assert len(references) == len(set(references)) > 50
    assert any(r.startswith("pkg:pypi/jupyterhub@") for r in references)


def test_committed_labextension_matches_its_source() -> None:
    """Else `make labextension` and commit what it writes."""
    source = IMAGES / "labextension"
    built = IMAGES / "common/lab/share/jupyter/labextensions/gpuspawner"
    lines = (built / "source.sha256").read_text(encoding="utf-8").splitlines()
    sealed = {name: found for found, _, name in (line.partition("  ") for line in lines)}
    parts = [source / name for name in ("src", "style")]
    there = [
        *source.glob("*.json"),
        *source.glob("*.mjs"),
        *(f for p in parts for f in p.iterdir()),
    ]
    names = {str(path.relative_to(source)) for path in there}
    assert names == set(sealed)
    for name in names:
        assert hashlib.sha256((source / name).read_bytes()).hexdigest() == sealed[name], name
    lock = (source / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in lock, "where packages come from, npm's own configuration says"
    package = json.loads((built / "package.json").read_text())
    assert (built / package["jupyterlab"]["_build"]["load"]).is_file()
    assert package["version"] == gpuspawner.__version__


@pytest.mark.parametrize(
    "name", [n for n in NAMES if '"jupyterlab' in (IMAGES / n / "Dockerfile").read_text()]
)
def test_jupyterlab_images_install_the_labextension(name: str) -> None:
    if said(name, "ARG")[0] != f"BASE_IMAGE={ON_BASE}":
        assert "common/lab /opt/gpuspawner/lab" in said(name, "COPY")
        assert any("python /opt/gpuspawner/lab/install.py" in run for run in said(name, "RUN"))
