"""A Linux of our own for what this machine's kernel may lack: XFS with project quotas.

User-mode Linux is a Linux kernel that runs as a process. It sees this machine's files (hostfs),
so the Python in it is this very checkout; its XFS lies in a file.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import c_library, processes
from tests.support.processes import PATIENCE, REPO, as_root

REGISTERS = Path(__file__).with_name("uml_registers.c")

MOUNT = "/run/xfs"
"""Where the file system is inside."""

DISK_BYTES = 400 * 2**20
"""XFS takes 300 MB at least."""

INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512CD,-AVX512DQ
cd {repo}
{{
    mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs run /run &&
    mkdir {mount} && mkfs.xfs -q -f /dev/ubdb && mount -t xfs -o prjquota /dev/ubdb {mount} &&
    PYTHONPATH={repo} PYTHONDONTWRITEBYTECODE=1 {python} -m {module} {mount} {answer}
}} > {log} 2>&1
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


def run_on_xfs(module: str, folder: Path, timeout: float = 400.0) -> Any:
    """Run ``python -m module MOUNT ANSWER`` as root on a fresh XFS; the JSON that it wrote.

    ``timeout`` (seconds) is for a machine at rest.
    """
    disk, init, log, answer = (folder / name for name in ("disk", "init", "log", "answer.json"))
    with open(disk, "wb") as file:
        file.truncate(DISK_BYTES)
    names = {"repo": REPO, "python": sys.executable, "log": log, "answer": answer}
    quoted = {name: shlex.quote(str(value)) for name, value in names.items()}
    init.write_text(INIT.format(module=module, mount=MOUNT, **quoted), encoding="utf-8")
    init.chmod(0o755)
    words = ["mem=384M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", "quiet"]
    words += [f"init={init}", f"ubdb={disk}", "con=null", "con0=null,fd:1"]
    environment = {**os.environ, "PATH": processes.system_path(), "TMPDIR": str(folder)}
    library = c_library.compiled("libuml_registers.so", REGISTERS)
    try:
        done = subprocess.run(
            as_root(["env", f"LD_PRELOAD={library}", "linux.uml", *words]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout * PATIENCE,
            env=environment,
            check=False,
        )
    finally:
        disk.unlink(missing_ok=True)
    if not answer.exists():
        said = log.read_text(errors="replace") if log.exists() else ""
        raise RuntimeError(f"{module} gave no answer:\n{said[-4000:]}\n{done.stdout[-2000:]}")
    return json.loads(answer.read_text(encoding="utf-8"))
