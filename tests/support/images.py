"""The images that tests run, built once by a real engine and found again by their content.

Nothing comes from an image registry: bases are made by debootstrap from packages.
What is particular to the machine that builds (a company's certificates, a proxy) goes into
that base and into build arguments here, so that the Dockerfiles stay as users need them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import docker.errors

from tests.support import cdi, processes
from tests.support.engine import PrivateEngine
from tests.support.processes import REPO, as_root, kept_dir, one_at_a_time

DEBIAN = "local/debian:bookworm"
SYSTEMS = {
    "debian-12": DEBIAN,
    "debian-13": "local/debian:trixie",
    "ubuntu-24.04": "local/ubuntu:noble",
}
"""Bases of a machine: each has its suite as its tag."""
BASE = "gpuspawner/base:test"
INSTANT = "gpuspawner/instant:test"
EXITS = "gpuspawner/exits:test"
SILENT = "gpuspawner/silent:test"
TRIED = "gpuspawner/tried:test"
VSCODE = "gpuspawner/vscode:test"
KEEPS_OUTPUTS = "gpuspawner/base-keep-outputs:test"
SCHEDULER = "gpuspawner/scheduler:test"
NGC_BASE = "gpuspawner/ngc-base:test"

LABEL = "org.gpuspawner.content"
"""On each image, the hash of everything that it was made of."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
HERE = Path(__file__).parent / "dockerfiles"
OURS = REPO / "images"
"""The images that we ship: each build sees its own folder and the common one."""


@dataclass(frozen=True)
class Recipe:
    """How one image is built."""

    tag: str
    folder: Path
    base: str = DEBIAN
    arguments: Mapping[str, str] = field(default_factory=dict)
    program: Path | None = None
    """A C file of the folder to compile, statically, into the build context."""
    keep: bool = False
    """Slow to build: keep a copy beside the engine, for an engine in another slot."""


def recipes() -> dict[str, Recipe]:
    """All images above the Debian base, by tag, in the order to build them."""
    hub = version("jupyterhub")
    instant = HERE / "instant"
    all_of_them = (
        Recipe(
            INSTANT,
            instant,
            arguments={"JUPYTERHUB_VERSION": hub},
            program=instant / "instant.c",
        ),
        Recipe(EXITS, HERE / "exits"),
        Recipe(SILENT, HERE / "silent"),
        Recipe(TRIED, HERE / "tried", program=instant / "instant.c", keep=True),
        Recipe(NGC_BASE, HERE / "ngc-base"),
        Recipe(
            BASE,
            OURS / "base",
            arguments={"JUPYTERHUB_REQUIREMENT": f"jupyterhub=={hub}"},
            keep=True,
        ),
        Recipe(VSCODE, OURS / "vscode", base=BASE, keep=True),
        Recipe(KEEPS_OUTPUTS, OURS / "keep-outputs", base=BASE, keep=True),
        Recipe(SCHEDULER, HERE / "scheduler", base=BASE),
    )
    return {r.tag: r for r in all_of_them}


def ensure_images(
    engine: PrivateEngine, tags: Sequence[str] = (INSTANT, EXITS, SILENT, BASE)
) -> None:
    """Build what the engine does not have yet; quick when nothing changed.

    One process at a time: the next one then finds what the first one kept.
    """
    known = recipes()
    with one_at_a_time("images"):
        _ensure_base(engine, DEBIAN)
        for tag in tags:
            build(engine, known[tag])


def build(engine: PrivateEngine, recipe: Recipe) -> str:
    """Build one image unless the engine has it with this very content. Returns its tag."""
    if recipe.base.startswith("local/"):
        _ensure_base(engine, recipe.base)
    context = _context(recipe)
    content = _hash(context, json.dumps(dict(recipe.arguments)), _content(engine, recipe.base))
    copy = _kept(recipe.tag, content)
    if _content(engine, recipe.tag) == content:
        return recipe.tag
    if recipe.keep and copy.exists():
        with open(copy, "rb") as tar:
            engine.client.load_image(tar)
        if _content(engine, recipe.tag) == content:
            return recipe.tag
    print(f"building {recipe.tag} ...", flush=True)
    lines = engine.client.build(
        fileobj=_tar(context),
        custom_context=True,
        dockerfile=f"{recipe.folder.name}/Dockerfile" if recipe.folder.parent == OURS else None,
        tag=recipe.tag,
        rm=True,
        forcerm=True,
        decode=True,
        network_mode="host",
        labels={LABEL: content},
        buildargs={"BASE_IMAGE": recipe.base, **_proxies(), **recipe.arguments},
    )
    _follow(recipe.tag, lines)
    engine.client.prune_images({"dangling": True})  # what had the tag before
    if recipe.keep:
        _save(engine, recipe.tag, copy)
    return recipe.tag


def listed(engine: PrivateEngine, tag: str) -> set[str]:
    """The packages of one of our images, as the SBOM in it names them."""
    code, printed = engine.run(tag, ["cat", "/opt/gpuspawner/sbom.cdx.json"])
    assert code == 0, printed
    return {part["bom-ref"] for part in json.loads(printed)["components"]}


def locked(lock: Path) -> set[str]:
    """The packages of a lock file, named likewise."""
    lines = lock.read_text(encoding="utf-8").splitlines()[1:]
    return {f"pkg:pypi/{line.split()[0].replace('==', '@')}" for line in lines}


def _ensure_base(engine: PrivateEngine, image: str) -> None:
    repository, suite = image.split(":")
    certificates = CERTIFICATES.read_bytes() if CERTIFICATES.exists() else b""
    content = _hash({}, f"{suite} minbase 1", hashlib.sha256(certificates).hexdigest())
    if _content(engine, image) == content:
        return
    tar = _kept(image, content)
    if not tar.exists():
        print(f"making {image} with debootstrap ...", flush=True)
        _debootstrap(repository, suite, tar)
    changes = [f"LABEL {LABEL}={content}", 'CMD ["bash"]']
    if certificates:
        # pip brings its own list of authorities; a proxy's certificate is not in that.
        changes.append(f"ENV PIP_CERT={CERTIFICATES} NODE_EXTRA_CA_CERTS={CERTIFICATES}")
    source = str(tar)
    engine.client.import_image_from_file(source, repository=repository, tag=suite, changes=changes)


def _debootstrap(repository: str, suite: str, tar: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuspawner-debian-") as work:
        root = Path(work) / "root"
        environment = dict(os.environ, PATH=processes.system_path())
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates"]
        if repository == "local/ubuntu":
            keys = cdi.download(Path(work) / "keys", ["ubuntu-keyring"])
            command += [f"--keyring={keys}/usr/share/keyrings/ubuntu-archive-keyring.gpg"]
            # Debian 12's debootstrap does not know the suite, and all of Ubuntu's have one script.
            command += ["--components=main,universe", suite, str(root), "", "gutsy"]
        else:
            command += [suite, str(root)]
        try:
            processes.run(as_root(command), env=environment)
            if CERTIFICATES.exists():
                processes.run(as_root(["cp", str(CERTIFICATES), f"{root}{CERTIFICATES}"]))
            processes.run(as_root(["sh", "-c", f"rm -rf {root}/var/cache/apt/archives/*.deb"]))
            part = tar.with_suffix(".part")
            inside = ["--one-file-system", "--exclude=./proc/*", "--exclude=./sys/*", "."]
            processes.run(as_root(["tar", "-C", str(root), "-cf", str(part), *inside]))
            part.rename(tar)
        finally:
            processes.run(as_root(["rm", "-rf", str(root)]))


def _context(recipe: Recipe) -> dict[str, bytes]:
    """The build context: file name to content. One of ours sees what it shares with others."""
    root, folders = recipe.folder, [recipe.folder]
    if recipe.folder.parent == OURS:
        root, folders = OURS, [recipe.folder, OURS / "common"]
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }
    if recipe.program:
        files[recipe.program.stem] = _compile(recipe.program.read_bytes())
        files.pop(recipe.program.name, None)
    return files


def _compile(source: bytes) -> bytes:
    """A static program for this C source, kept by its hash so that images are too."""
    kept = kept_dir() / "programs" / hashlib.sha256(source).hexdigest()[:16]
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        with tempfile.TemporaryDirectory() as work:
            code, program = Path(work, "program.c"), Path(work, "program")
            code.write_bytes(source)
            processes.run([compiler, "-O2", "-static", "-s", "-o", program, code])
            part = kept.with_name(f"{kept.name}.{os.getpid()}")
            shutil.move(program, part)
            part.rename(kept)  # at once: another process may look for it now
    return kept.read_bytes()


def _tar(files: Mapping[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def _hash(files: Mapping[str, bytes], *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _content(engine: PrivateEngine, tag: str) -> str:
    """The content label of an image that the engine has; empty when it has none."""
    try:
        config = engine.client.inspect_image(tag)["Config"]
    except docker.errors.ImageNotFound:
        return ""
    return str((config.get("Labels") or {}).get(LABEL, ""))


def _kept(tag: str, content: str) -> Path:
    folder = kept_dir() / "images"
    folder.mkdir(exist_ok=True)
    return folder / f"{tag.replace('/', '-').replace(':', '-')}-{content}.tar"


def _save(engine: PrivateEngine, tag: str, copy: Path) -> None:
    for older in copy.parent.glob(f"{copy.stem.rsplit('-', 1)[0]}-*.tar"):
        older.unlink(missing_ok=True)
    part = copy.with_suffix(f".{os.getpid()}.part")
    with open(part, "wb") as f:
        f.writelines(engine.client.get_image(tag))
    part.rename(copy)


def _proxies() -> dict[str, str]:
    """Docker knows these build arguments without an ARG line, and keeps none in the image."""
    names: tuple[str, ...] = ("http_proxy", "https_proxy", "no_proxy")
    names += tuple(n.upper() for n in names)
    return {n: os.environ[n] for n in names if os.environ.get(n)}


def _follow(tag: str, lines: Iterable[Mapping[str, str]]) -> None:
    """Read the build to its end; its last lines go into the error when it failed."""
    seen: list[str] = []
    for line in lines:
        seen.append(line.get("stream", "") or line.get("error", ""))
        if "error" in line:
            raise RuntimeError(f"building {tag} failed:\n{''.join(seen)[-4000:]}")
