"""README's steps for a real box, from the first to a member's server. Real: a new Debian 12 with
systemd as its first process, packages, units, Docker in it, images, an identity provider. It is a
container with this machine's kernel, and its GPUs are simulated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import readme
from tests.support.box import Box
from tests.support.engine import PrivateEngine
from tests.support.images import DEBIAN
from tests.support.processes import REPO
from tests.support.site import SECRET, SECRETS, Site

LOOK = """
import json, os
open(os.path.expanduser("~/work/notes.txt"), "a").write("here")
print(json.dumps([os.environ["NVIDIA_VISIBLE_DEVICES"], os.environ["JUPYTERHUB_USER"]]))
"""

MODES = {
    "/etc/gpuspawner": "755 root",
    "/etc/gpuspawner/environment": "600 root",
    "/etc/gpuspawner/oauth_client_secret": "600 root",
    "/var/lib/gpuspawner": "700 gpuspawner",
    "/var/lib/gpuspawner/gpuspawner.sqlite": "600 gpuspawner",
}


@pytest.fixture
def site(
    soak: None, hubs: None, processes: None, engine: PrivateEngine, tmp_path: Path
) -> Iterator[Site]:
    with Box(engine, tmp_path / "copy") as box, Site(box, tmp_path, members=["ada"]) as site:
        yield site


def debian_of_images() -> str:
    """The image that base starts from, which a registry would have."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", (REPO / "images/base/Dockerfile").read_text(), re.M)
    assert found
    return found[1]


def test_readme_steps_produce_a_working_server(site: Site) -> None:
    box = site.box
    blocks = readme.filled_in(readme.commands(readme.BOX), site.typed)
    for block in blocks:
        if readme.COMPOSE in block:
            continue  # in the place of the units
        if "images/build" in block:
            box.load(DEBIAN, debian_of_images())
        box.run(block, typed=SECRETS if SECRET in block else "", timeout=600)
        if SECRET in block:
            site.edit()  # "Now read the two files"

    site.wait()
    for path, expected in MODES.items():
        assert box.run(f"stat -c '%a %U' {path}").strip() == expected, path
    for unit in ("docker", "gpuspawner-proxy", "gpuspawner"):
        assert box.run(f"systemctl is-enabled {unit}").strip() == "enabled"
    ada = site.member("ada")
    ada.spawn({"environment": "base", "gpus": "1"})
    device, name = json.loads(ada.run(LOOK))
    assert device.startswith("GPU-") and name == "ada"

    # The hub goes and comes back; the server lives on behind the proxy.
    box.run("systemctl restart gpuspawner")
    site.wait()
    assert json.loads(ada.run(LOOK)) == [device, "ada"]
    assert box.run("cat /var/lib/docker/volumes/gpuspawner-work-ada/_data/notes.txt") == "herehere"

    # And so does the machine, with nobody there.
    box.reboot()
    site.wait()
    ada = site.member("ada")
    ada.spawn({"environment": "base", "gpus": "1"})
    assert json.loads(ada.run(LOOK))[1] == "ada"
