"""CDI without a driver: an Engine that knows it, and a specification such as NVIDIA's.

Where the system's Docker Engine is older than 25, Debian 13's is unpacked beside it: its
programs run on Debian 12.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.processes import kept_dir, one_at_a_time

SUITE = "trixie"
PACKAGES = ("docker.io", "containerd")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def programs_with_cdi() -> Path | None:
    """The folder of a dockerd that knows CDI; None when the one on PATH does."""
    if _version(shutil.which("dockerd", path=processes.system_path())) >= 25:
        return None
    folder = kept_dir() / f"docker-{SUITE}"
    with one_at_a_time(folder.name):
        if not (folder / "dockerd").exists():
            print(f"fetching Debian {SUITE}'s Docker Engine ...", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            unpack(folder, PACKAGES)
    return folder


def write_specification(folder: Path, machine: Sequence[dict[str, Any]]) -> None:
    """Describe the devices as ``nvidia-ctk cdi generate`` does: by index, by UUID, and ``all``.

    ``machine`` has an entry a device: its ``uuid``, ``minor`` and ``model``. The nvidia-smi that
    containers get lists those whose device node is there.
    """
    folder.mkdir(exist_ok=True)
    lines = ["#!/bin/sh", "n=0"]
    for d in machine:
        shown = f'echo "GPU $n: {d["model"]} (UUID: {d["uuid"]})"; n=$((n + 1))'
        lines.append(f"if [ -e /dev/nvidia{d['minor']} ]; then {shown}; fi")
    smi = folder / "nvidia-smi"
    smi.write_text("\n".join(lines) + "\n", encoding="utf-8")
    smi.chmod(0o755)

    def entry(name: str, *devices: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {"path": f"/dev/nvidia{d['minor']}", "type": "c", "major": 195, "minor": d["minor"]}
            for d in devices
        ]
        return {"name": name, "containerEdits": {"deviceNodes": nodes}}

    mount = {"hostPath": str(smi), "containerPath": "/usr/bin/nvidia-smi", "options": ["bind"]}
    specification = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            *(entry(d["uuid"], d) for d in machine),
            *(entry(str(i), d) for i, d in enumerate(machine)),
            entry("all", *machine),
        ],
        # As NVIDIA's: the hook shall not add devices of its own.
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": [mount]},
    }
    part = folder / "part"
    part.write_text(json.dumps(specification), encoding="utf-8")
    part.rename(folder / "nvidia.json")


def _version(dockerd: str | None) -> int:
    if not dockerd:
        return 0
    told = subprocess.run([dockerd, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\d+)", told.stdout)
    return int(found[1]) if found else 0


def unpack(folder: Path, packages: Sequence[str]) -> None:
    """Download packages of Debian 13, and gather their programs in a folder."""
    work = folder.with_suffix(".part")
    shutil.rmtree(work, ignore_errors=True)
    root = download(work, packages)
    (work / "programs").mkdir()
    for name in ("bin", "sbin", "libexec/docker", "libexec/docker/cli-plugins"):
        for program in (root / "usr" / name).glob("*"):
            if program.is_file() and os.access(program, os.X_OK):
                shutil.copy2(program, work / "programs")
    (work / "programs").rename(folder)
    shutil.rmtree(work)


def download(work: Path, packages: Sequence[str]) -> Path:
    """Unpack packages of Debian 13, by lists of our own. Returns the folder that is their root."""
    for name in ("lists/partial", "archives/partial", "root"):
        (work / name).mkdir(parents=True)
    told = processes.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"])
    mirror = next(uri for uri in told.split() if "security" not in uri)
    source = f"deb [signed-by={KEYRING}] {mirror} {SUITE} main\n"
    (work / "sources.list").write_text(source, encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work,
        "APT::Sandbox::User": "root",  # apt's own user need not reach the cache
    }
    apt = ["apt-get", "-q", *(w for k, v in settings.items() for w in ("-o", f"{k}={v}"))]
    processes.run([*apt, "update"])
    processes.run([*apt, "download", *packages], cwd=work)
    for package in work.glob("*.deb"):
        processes.run(["dpkg", "-x", package, work / "root"])
    return work / "root"
