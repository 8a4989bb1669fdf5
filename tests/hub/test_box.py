"""The tutorial "Your GPU box", from the first step to the last, the page about TLS, and the Ansible
role. Real: a new Debian or Ubuntu with systemd as its first process, packages, `gpuspawner init`,
units, Docker in it, an image, members' kernels, nginx, an authority's certificate, Ansible. It is a
container with this machine's kernel. Stand-ins: the GPUs, their driver, NVIDIA's hook."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.support import steps
from tests.support.box import COPY, MACHINES, Box
from tests.support.doc_blocks import Block, code_in
from tests.support.engine import PrivateEngine
from tests.support.images import DEBIAN
from tests.support.processes import REPO, free_port, wait_for
from tests.support.site import LIST, ONE_ENVIRONMENT, ONE_GPU, Site
from tests.support.visitor import Visitor, text_of

NAME = "gpu.lab.example"
TYPED = {
    "https://YOUR-COPY/gpuspawner": f"file://{COPY}",
    # PyTorch and CUDA are gigabytes. Without them, its environment is not in the catalog.
    "images/build base pytorch": "images/build base",
    "--admin YOUR-NAME": "--admin grace --catalog /root/catalog.yaml",
}
TLS_TYPED = {"YOUR.NAME": NAME, "gpu.example.org": NAME}

WRITE = 'import os; open(os.path.expanduser("~/work/notes.txt"), "a").write("here")'
READ = 'import os; print(open(os.path.expanduser("~/work/notes.txt")).read())'

AUTHORITY = "/usr/local/share/ca-certificates/tests.crt"
FILES = f"/etc/letsencrypt/live/{NAME}"
CERTIFICATE = f"""
apt-get install curl
echo 127.0.0.1 {NAME} >> /etc/hosts
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj '/CN=An authority of the tests' \\
    -addext keyUsage=critical,keyCertSign -keyout /root/authority.key -out {AUTHORITY}
update-ca-certificates
mkdir -p {FILES}
openssl req -x509 -CA {AUTHORITY} -CAkey /root/authority.key -newkey rsa:2048 -nodes -days 2 \\
    -subj /CN={NAME} -addext subjectAltName=DNS:{NAME} -addext basicConstraints=critical,CA:FALSE \\
    -keyout {FILES}/privkey.pem -out {FILES}/fullchain.pem
"""
DROP_IN = Path("/etc/systemd/system/gpuspawner-proxy.service.d/override.conf")
"""Where ``systemctl edit`` writes, which needs a terminal."""

MIG_LOG = "journalctl --boot --unit gpuspawner-mig"
"""What the unit said that makes MIG instances again."""

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
        box.write("/root/catalog.yaml", ONE_ENVIRONMENT)
        yield box


def debian_of_images() -> str:
    """The image that base starts from, which a registry would have."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", (REPO / "images/base/Dockerfile").read_text(), re.M)
    assert found
    return found[1]


@pytest.mark.parametrize("box", MACHINES, indirect=True)
def test_tutorial_works_as_it_is_written(
    box: Box,
    record_property: Callable[[str, object], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    assert "No layouts are recorded." in box.run(MIG_LOG)

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
    assert "No layouts are recorded." in box.run(MIG_LOG)
    ada = Visitor(site.url, "ada", password)
    ada.spawn(ONE_GPU)
    assert "GPU 0: " in ada.run(LIST)
    assert ada.run(READ).strip() == "here"

    # And behind TLS, by nginx and then by the proxy itself.
    give_certificate(box, tmp_path / "authority.pem", monkeypatch)
    nginx, restart, log, shown = steps.filled_in(steps.TLS, TLS_TYPED)
    (drop_in,) = (text for kind, text in code_in(steps.TLS) if kind == "ini")
    site.url = f"https://{NAME}"
    box.run(nginx)
    site.wait()
    assert not names_of_open_cookies(box, site, shown, password)
    box.run("systemctl disable --now nginx")
    box.run(f"mkdir {DROP_IN.parent}")
    box.write(str(DROP_IN), drop_in.replace("gpu.example.org", NAME))
    box.run(f"systemctl daemon-reload; {restart}")
    site.wait()
    assert "Added HTTP to HTTPS redirection from 80 to 443" in box.run(log)
    assert names_of_open_cookies(box, site, shown, password) == {"_xsrf"}


def give_certificate(box: Box, authority: Path, patch: pytest.MonkeyPatch) -> None:
    """Give the box a name and a certificate. We trust its authority, and find it by its name."""
    box.run(CERTIFICATE)
    authority.write_text(box.run(f"cat {AUTHORITY}"))
    for client in ("REQUESTS", "WEBSOCKET_CLIENT"):
        patch.setenv(f"{client}_CA_BUNDLE", str(authority))
    port = free_port()
    box.reach(port, of_box=443)
    look_up = socket.getaddrinfo

    def look_up_box(host: str, at: int, *rest: Any, **more: Any) -> list[Any]:
        where = ("127.0.0.1", port) if (host, at) == (NAME, 443) else (host, at)
        return look_up(*where, *rest, **more)

    patch.setattr(socket, "getaddrinfo", look_up_box)


def names_of_open_cookies(box: Box, site: Site, seen: str, password: str) -> set[str]:
    """See what the page says that one sees, and run a cell. Return the names of cookies that a
    browser would also send without TLS."""
    for line, shown in steps.lines_of(Block(0, "console", "", seen)):
        assert box.run(line).splitlines() == shown
    ada = Visitor(site.url, "ada", password)
    assert "GPU 0: " in ada.run(LIST)
    assert ada.get("/user/ada/lab").ok and ada.get("/services/gpu/").ok
    jar: CookieJar = ada.session.cookies
    cookies = list(jar)
    assert len({cookie.path for cookie in cookies}) >= 3, cookies
    return {cookie.name for cookie in cookies if not cookie.secure}


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
