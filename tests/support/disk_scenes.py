"""What happens on Docker Engines whose storage driver limits containers: overlay2 on an XFS with
project quotas, and btrfs; and to workspaces with quotas. Run in a kernel that has both, as root, by
:mod:`tests.support.uml`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker

from gpuspawner.engines import scratch
from gpuspawner.engines.disk_usage import (
    check_disk,
    label_of,
    limited,
    may_enforce,
    refusal,
    size_option,
    written_bytes,
)
from tests.support import quota_scenes
from tests.support.processes import PATIENCE
from tests.support.slurm_images import busybox_root

MB = 2**20
LIMIT = 20 * MB
LARGE = "gpuspawner/large:test"
"""An image that is larger than the limit."""
MODULES = Path("/usr/lib/uml/modules")
GROUPS = Path("/sys/fs/cgroup")
"""Of version 2, in which alone all controllers are together."""
SETTINGS = ("--iptables=false", "--ip-masq=false", "--ip-forward=false", "--bridge=none")
PATIENCE_SECONDS = 60.0 * PATIENCE


def shell(command: str) -> None:
    subprocess.run(["sh", "-ec", command], check=True, timeout=PATIENCE_SECONDS)


def eventually(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)
    return found


def prepare() -> None:
    """Give this kernel what an engine needs of it."""
    for name in ("overlay", "loop"):
        [module] = MODULES.glob(f"*/**/{name}.ko")
        shell(f"busybox insmod {module}")
    shell(f"mount -t cgroup2 cgroups {GROUPS}")
    # A group with processes of its own cannot limit those below it; the kernel's threads stay.
    shell(
        f"mkdir {GROUPS}/init && for pid in $(cat {GROUPS}/cgroup.procs); do "
        f"echo $pid > {GROUPS}/init/cgroup.procs 2> /dev/null || true; done"
    )
    # This kernel does not give its controller of CPUs away.
    shell(f"echo +io +memory +pids > {GROUPS}/cgroup.subtree_control")


@contextmanager
def engine(driver: str, data: Path) -> Iterator[docker.APIClient]:
    """An engine with this storage driver, and with the image."""
    place = Path("/run") / driver
    place.mkdir()
    (place / "daemon.json").write_text("{}", encoding="utf-8")
    url = f"unix://{place}/docker.sock"
    words = [
        *("dockerd", *SETTINGS, "--storage-driver", driver, "--data-root", str(data)),
        *("--config-file", f"{place}/daemon.json", "--exec-root", f"{place}/exec"),
        *("--pidfile", f"{place}/pid", "--host", url),
        *("--exec-opt", "native.cgroupdriver=cgroupfs"),
    ]
    with open(place / "log", "wb") as log:
        daemon = subprocess.Popen(words, stdout=log, stderr=log)
    try:

        def connect() -> docker.APIClient | None:
            if daemon.poll() is not None:
                raise RuntimeError((place / "log").read_text(errors="replace")[-3000:])
            try:
                return docker.APIClient(base_url=url, version="auto", timeout=int(PATIENCE_SECONDS))
            except docker.errors.DockerException:
                return None

        client = eventually(connect, "dockerd to answer")
        repository, _, tag = LARGE.partition(":")
        root = busybox_root(bytes(LIMIT + 4 * MB))
        client.import_image_from_data(root, repository=repository, tag=tag)
        yield client
    finally:
        daemon.terminate()
        daemon.wait(PATIENCE_SECONDS)


def writing(file: str, megabytes: int) -> str:
    """What a shell runs to write so much, or as much as it can, and to say that it has.

    On one stream: what is written to two may reach a container's log in any order.
    """
    return f"exec 2>&1; dd if=/dev/zero of={file} bs=1M count={megabytes} conv=fsync; echo done"


def said(client: docker.APIClient, container: str) -> str:
    """What a container has said of its writing, once it has ended."""

    def look() -> str:
        text: str = client.logs(container).decode()
        return text if text.endswith("done\n") else ""

    return str(eventually(look, "the end of its writing"))


def writes(client: docker.APIClient, user: str, megabytes: int, option: int) -> str:
    """A container that wrote so much, or as much as it could, and goes on."""
    host = {"NetworkMode": "none", "StorageOpt": {"size": str(option)}}
    labels = {"gpuspawner.lease": user, "gpuspawner.disk_limit": label_of(LIMIT, True)}
    script = f"{writing('/written', megabytes)}; sleep 600"
    made = client.create_container(LARGE, ["sh", "-c", script], host_config=host, labels=labels)
    client.start(made["Id"])
    return str(made["Id"])


def scene(driver: str, data: Path, **wishes: int) -> dict[str, Any]:
    """``wishes``: megabytes that containers try to write, by their member."""
    with engine(driver, data) as client:
        option = size_option(client, driver, LARGE, LIMIT)
        found: dict[str, Any] = {
            "may": may_enforce(client.info()),
            "refusal": refusal(client, LARGE, option),
            "image": client.inspect_image(LARGE)["Size"],
            "option": option,
            "check": check_disk(client, LARGE, LIMIT, is_local=True).text,
            "untried": check_disk(client, "", LIMIT, is_local=True, why="nobody tried.").text,
        }
        for user, megabytes in wishes.items():
            container = writes(client, user, megabytes, option)
            found[user] = said(client, container)
            found[f"{user} used"] = client.stats(container, stream=False, one_shot=True)
        for each in limited(client):
            written = written_bytes(client, each.container_id) or 0
            found[f"{each.lease_id} judged"] = [written, each.judge(written)]
            client.remove_container(each.container_id, force=True)
        if driver == "overlay2":
            found["scratch"] = scratch_scene(client)
        return found


def scratch_scene(client: docker.APIClient) -> dict[str, Any]:
    """A container that fills its scratch directory, and its neighbour's."""
    found: dict[str, Any] = {"refusal": scratch.refusal(client, LIMIT)}
    for user, megabytes in (("hog", 40), ("neighbour", 10)):
        mount = scratch.Scratch("/scratch", LIMIT, is_enforced=True).mount(user)
        host = {"NetworkMode": "none", "Mounts": [mount]}
        script = writing("/scratch/large", megabytes)
        made = client.create_container(LARGE, ["sh", "-c", script], host_config=host)
        client.put_archive(made["Id"], *scratch.archive_of("/scratch", ""))
        client.start(made["Id"])
        client.wait(made["Id"])
        found[user] = said(client, made["Id"])
        client.remove_container(made["Id"], v=True)
    check = scratch.check_scratch(client, LIMIT, is_local=True, is_removed=True)
    found["check"] = check.text if check else ""
    found["left"] = [volume["Name"] for volume in client.volumes()["Volumes"] or []]
    return found


def quotas(folder: Path) -> str:
    """Return the traceback of the first check of quotas that fails in this folder, else nothing."""
    folder.mkdir()
    try:
        quota_scenes.main(folder)
    except Exception:
        return traceback.format_exc()
    shutil.rmtree(folder)
    return ""


def main(mount: Path, answer: Path) -> None:
    found: dict[str, Any] = {"quotas": quotas(mount / "files")}
    prepare()
    found |= {"overlay2": scene("overlay2", mount / "docker", hog=40, neighbour=10)}
    disk, place = answer.parent / "btrfs", Path("/run/on-btrfs")
    place.mkdir()
    with open(disk, "wb") as file:
        file.truncate(400 * MB)
    shell(f"mkfs.btrfs -q {disk} && mount -o loop {disk} {place}")
    found["btrfs"] = scene("btrfs", place, hog=40)
    disk.unlink()
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
