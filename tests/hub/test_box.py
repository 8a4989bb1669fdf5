"""The tutorial "Your GPU box", from the first step to the last, and the Ansible role. Real: new
Debians with systemd as its first process, packages, `gpuspawner init`, units, Docker in it, an
image, members' kernels, Ansible. Each is a container with this machine's kernel. Stand-ins: the
GPUs, their driver, NVIDIA's hook."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import steps
from tests.support.box import COPY, MACHINES, Box
from tests.support.doc_blocks import code_in
from tests.support.engine import PrivateEngine
from tests.support.images import DEBIAN
from tests.support.processes import REPO, wait_for
from tests.support.site import Site
from tests.support.visitor import Visitor, text_of

TYPED = {
    "https://YOUR-COPY/gpuspawner": f"file://{COPY}",
    # PyTorch and CUDA are gigabytes. Without them, its environment is not in the catalog.
    "images/build base pytorch": "images/build base",
    "--admin YOUR-NAME": "--admin grace --catalog /root/catalog.yaml",
}
CATALOG = """
environments:
  - slug: base
    display_name: JupyterLab
    image: gpuspawner/base:latest
    devices: {default: 1, max: 1}
"""
ONE_GPU = {"environment": "base", "gpus": "1"}

LIST = 'import subprocess; print(subprocess.check_output(["nvidia-smi", "-L"], text=True))'
WRITE = 'import os; open(os.path.expanduser("~/work/notes.txt"), "a").write("here")'
READ = 'import os; print(open(os.path.expanduser("~/work/notes.txt")).read())'

MODES = {
    "/etc/gpuspawner": "755 root",
    "/etc/gpuspawner/environment": "600 root",
    "/var/lib/gpuspawner": "700 gpuspawner",
    "/var/lib/gpuspawner/gpuspawner.sqlite": "600 gpuspawner",
}


@pytest.fixture
def box(
    request: pytest.FixtureRequest,
    soak: None,
    hubs: None,
    processes: None,
    engine: PrivateEngine,
    tmp_path: Path,
) -> Iterator[Box]:
    machine = MACHINES[getattr(request, "param", "debian-12")]
    with Box(engine, tmp_path / "copy", machine) as box:
        box.add_gpus(2)
        box.write("/root/catalog.yaml", CATALOG)
        yield box


def debian_of_images() -> str:
    """The image that base starts from, which a registry would have."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", (REPO / "images/base/Dockerfile").read_text(), re.M)
    assert found
    return found[1]


@pytest.mark.parametrize("box", MACHINES, indirect=True)
def test_tutorial_works_as_it_is_written(
    box: Box, record_property: Callable[[str, object], None]
) -> None:
    packages, programs, images, init, passwords, *sections = steps.filled_in(steps.BOX, TYPED)
    answers = [text.strip() for kind, text in code_in(steps.BOX) if kind == "text"]
    site = Site(box)

    # 1. Install.
    box.run(packages, timeout=600)
    begun = time.monotonic()  # with the copy of the repository, just before `pip install`
    box.run(programs, timeout=600)
    box.load(DEBIAN, debian_of_images())
    box.run(images, timeout=900)
    assert "Admins: grace." in box.run(init, timeout=600)
    site.wait()
    for path, expected in MODES.items():
        assert box.run(f"stat -c '%a %U' {path}").strip() == expected, path
    for unit in ("docker", "gpuspawner-proxy", "gpuspawner"):
        assert box.run(f"systemctl is-enabled {unit}").strip() == "enabled"
    lines = box.run(passwords).splitlines()
    password = dict(line.split("=", 1) for line in lines)["GPUSPAWNER_MEMBER_PASSWORD"]
    assert "Nothing to change" in box.run(init)

    # 2. Two members on two GPUs.
    devices, credit, queue, leases, backup, restart = sections
    ada, bob = (Visitor(site.url, name, password) for name in ("ada", "bob"))
    seen = list[str]()
    for member in (ada, bob):
        member.spawn(ONE_GPU)
        if not seen:
            seconds = round(time.monotonic() - begun)
            record_property("seconds from pip install to the first session", seconds)
            print(f"From pip install to the first session: {seconds} s")
        (listed,) = member.run(LIST).strip().splitlines()
        assert listed.startswith("GPU 0: ")
        seen.append(listed.partition("UUID: ")[2])
    assert len(set(seen)) == 2
    ada.run(WRITE)
    printed = box.run(devices)
    assert printed.strip().endswith(answers[0])
    assert all(name in printed for name in ("leased", "ada", "bob"))

    # 3. Credits.
    assert "125" in box.run(credit)

    # 4. The queue.
    cleo = Visitor(site.url, "cleo", password)
    assert "Waiting for a GPU" in text_of(cleo.post("/hub/spawn", ONE_GPU))
    assert "cleo" in box.run(queue)
    wait_for(lambda: (cleo.server() or {}).get("ready"), "cleo's server", timeout=90)
    printed = box.run(leases)
    assert "ada" in printed and "cleo" in printed and "bob" not in printed

    # 5. A backup.
    assert "can be restored: every invariant holds" in box.run(backup)

    # 6. The hub goes and comes back; servers live on behind the proxy. So does the machine, with
    # nobody there.
    box.run(restart)
    site.wait()
    assert seen[0] in ada.run(LIST)
    box.reboot()
    site.wait()
    ada = Visitor(site.url, "ada", password)
    ada.spawn(ONE_GPU)
    assert "GPU 0: " in ada.run(LIST)
    assert ada.run(READ).strip() == "here"


def test_ansible_role_installs_a_hub_and_changes_nothing_twice(box: Box) -> None:
    box.run("apt-get update; apt-get install docker.io; apt-get install ansible-core", timeout=600)
    box.load(DEBIAN, debian_of_images())
    values = {
        "gpuspawner_repository": f"file://{COPY}",
        "gpuspawner_images": ["base"],
        "gpuspawner_catalog": "/root/catalog.yaml",
        "gpuspawner_admins": ["grace", "hedy"],
        "gpuspawner_secrets": {"GPUSPAWNER_MEMBER_PASSWORD": "of the members' own"},
    }
    box.write("/root/values.json", json.dumps(values))
    play = f"cd {COPY}/hub_config/ansible; ansible-playbook -i box, -c local -e @/root/values.json"
    assert "failed=0" in box.run(f"{play} site.yml", timeout=1500)
    site = Site(box)
    site.wait()
    ada = Visitor(site.url, "ada", "of the members' own")
    ada.spawn(ONE_GPU)
    assert "GPU 0: " in ada.run(LIST)

    again = box.run(f"{play} site.yml", timeout=600)
    assert "changed=0" in again and "failed=0" in again
    changed = box.run(f"{play} -e gpuspawner_domain=gpu.lab.example site.yml", timeout=600)
    assert "changed=1" in changed
    assert "server_name gpu.lab.example;" in box.run("cat /etc/gpuspawner/nginx.conf")
