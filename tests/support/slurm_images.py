"""The quick images once more, on busybox instead of Debian: each new node has them in no time."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path

from tests.support import images, processes
from tests.support.engine import PrivateEngine

COMMANDS = {
    images.INSTANT: '["instant"]',
    images.SILENT: '["sh", "-c", "trap exit TERM; while :; do sleep 1; done"]',
    images.EXITS: '["sh", "-c", "echo made to fail >&2; exit 3"]',
}
"""What each one runs, by its name."""


def import_quick_images(engine: PrivateEngine) -> None:
    """Give an engine INSTANT, SILENT and EXITS of ``tests.support.images``, unless it has them."""
    hub = version("jupyterhub")
    settings = [
        f"ENV INSTANT_JUPYTERHUB_VERSION={hub}",
        "ENV NVIDIA_VISIBLE_DEVICES=void",
        "EXPOSE 8888",
    ]
    program = images.HERE / "instant" / "instant.c"
    root = busybox_root(images._compile(program.read_bytes()))
    for tag, command in COMMANDS.items():
        name, _, label = tag.partition(":")
        changes = [*settings, f"CMD {command}"]
        engine.client.import_image_from_data(root, repository=name, tag=label, changes=changes)
    engine.client.prune_images({"dangling": True})


def busybox_root(instant: bytes) -> bytes:
    """A machine of one program that does what a shell's commands do, and a server."""
    found = shutil.which("busybox", path=processes.system_path())
    if not found:
        raise RuntimeError("busybox is not installed: run scripts/test_parts.sh")
    applets = subprocess.run([found, "--list"], stdout=subprocess.PIPE, text=True, check=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "usr", "usr/bin"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for name, content in (
            ("bin/busybox", Path(found).read_bytes()),
            ("usr/bin/instant", instant),
            ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for name in sorted(set(applets.stdout.split()) - {"busybox"}):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()
