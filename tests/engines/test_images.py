"""Real: the images that we ship, built and run by a real Docker Engine under a real hub.

They are built from their lock files, on a Debian base. NVIDIA's and NGC's own bases are not here,
so NGC's image is built on a stand-in for them. There is no GPU: CUDA's libraries are installed,
and find no driver. VS Code's image is in tests/hub/test_vscode.py.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

import pytest

from gpuspawner.engines.smoke_test import passed, smoke
from tests.support.engine import DEVICES, PrivateEngine
from tests.support.processes import REPO, wait_for


def shell(engine: PrivateEngine, image: str, command: str, **kwargs: Any) -> str:
    """What a login shell in the image prints for the command, which must succeed."""
    code, printed = engine.run(image, ["bash", "-lc", command], **kwargs)
    assert code == 0, printed
    return printed.strip()


def test_base_image_imports_no_unneeded_modules_at_startup(
    clean_engine: PrivateEngine, images: Any
) -> None:
    begin = "it = runpy.run_path('/opt/gpuspawner/singleuser.py')"
    begin += "; it['without_hub'](); it['without_listings'](); from jupyterhub import orm, scopes"
    use = "from jupyterlab_server.listings_handler import requests as later; later.request"
    code = f"import runpy; {begin}; {use}; orm.User; scopes.sa.inspect; import requests.adapters"
    commands = [
        "python -X importtime -m jupyterhub.singleuser --version 2>&1",
        "echo ---; python -X importtime $(which jupyterhub-singleuser) --version 2>&1",
        # Other programs find all that is installed, and so do the server's own parts later.
        "echo ---; python -c 'import rfc3987_syntax, jupyterhub.handlers'",
        f'python -c "{code}"',
    ]
    plain, ours, _ = shell(clean_engine, images.BASE, " && ".join(commands)).split("---")

    def imported(told: str) -> set[str]:
        return set(re.findall(r"\|\s+(\w+)$", told, re.MULTILINE))

    unneeded = {"lark", "alembic", "sqlalchemy"}
    assert unneeded <= imported(plain), "images/common/singleuser.py may go"
    assert "tornado" in imported(ours) and not unneeded & imported(ours)


def test_base_image_user_has_jupyterhub_and_can_write_to_work_and_packages(
    clean_engine: PrivateEngine, images: Any
) -> None:
    commands = [
        *("jupyterhub-singleuser --version", "id -un; id -u; pwd; echo $HOME; which python git"),
        # A notebook's `pip install` has a place to write to, and so has the member.
        "touch ~/.file; cd ~/work && touch file; test -w /opt/venv/lib/python3*/*",
    ]
    assert shell(clean_engine, images.BASE, " && ".join(commands)).splitlines() == [
        version("jupyterhub"),  # the hub's own
        "jovyan",
        "1000",
        "/home/jovyan/work",
        "/home/jovyan",
        "/opt/venv/bin/python",
        "/usr/bin/git",
    ]
    # A new volume belongs to the member.
    binds = {"workspace-of-ann": {"bind": "/home/jovyan/work", "mode": "rw"}}
    shell(clean_engine, images.BASE, "echo kept > file", binds=binds)
    assert shell(clean_engine, images.BASE, "cat file", binds=binds) == "kept"


def test_base_image_sees_no_gpu_unless_leased(clean_engine: PrivateEngine, images: Any) -> None:
    look = "echo $NVIDIA_VISIBLE_DEVICES; ls /dev | grep nvidia; true"
    assert shell(clean_engine, images.BASE, look) == "void"
    assert shell(clean_engine, images.BASE, look, runtime="nvidia") == "void"
    leased = shell(clean_engine, images.BASE, look, devices=[DEVICES[0]])
    assert leased.splitlines() == [DEVICES[0], "nvidia0"]


def test_base_image_runs_notebook_and_terminal_and_stops_cleanly(
    clean_engine: PrivateEngine, images: Any, hub_factory: Any
) -> None:
    hub = hub_factory(
        f"""
c.JupyterHub.spawner_class = "docker"
c.DockerSpawner.client_kwargs = {{"base_url": {clean_engine.url!r}}}
c.DockerSpawner.image = {images.BASE!r}
c.DockerSpawner.remove = True
c.DockerSpawner.environment = {{"GPUSPAWNER_GPU_COUNT": "0"}}
""",
        hub_ip=clean_engine.gateway,
    )
    hub.spawn("ann")
    hub.wait_server("ann")
    assert "JupyterLab" in hub.get("ann", "lab").text
    [container] = clean_engine.client.containers()
    log = functools.partial(clean_engine.client.logs, container["Id"])
    wait_for(lambda: b"A kernel is made ready" in log(), "a kernel in advance")
    code = "import os; open('note', 'w').write('hello'); print(os.getcwd(), os.getuid())"
    assert hub.kernel_run("ann", code) == "/home/jovyan/work 1000\n"
    told = (b"The kernel was ready", b"started as usual")
    wait_for(lambda: any(words in log() for words in told), "the server's word on the kernel")
    assert b"The kernel was ready" in log() and b"started as usual" not in log()
    assert "html" in hub.get("ann", "api/nbconvert", timeout=90).json()
    assert b"listed by the server itself" not in log()
    screen = hub.terminal_run("ann", "echo $0 $(cat note) $(which pip)")
    assert re.search(r"bash hello /opt/venv/bin/pip", screen)
    started = time.time()
    hub.stop_server("ann")
    [end] = clean_engine.client.events(
        since=started, until=time.time(), filters={"event": "die"}, decode=True
    )
    # 137: Docker waited 10 s for a server that does not hear SIGTERM, and killed it.
    assert end["Actor"]["Attributes"]["exitCode"] != "137"


def test_base_image_passes_its_smoke_test(clean_engine: PrivateEngine, images: Any) -> None:
    found = smoke(clean_engine.client, images.BASE, first_page="/lab")
    assert passed(found), found
    assert [finding.name for finding in found] == [
        "user",
        "import jupyterlab",
        "import jupyterhub",
        "devices",
        "workspace",
        "dataset",
        "server",
    ]
    assert found[-1].text.endswith("; also lab")
    assert not clean_engine.client.containers(all=True)
    assert not clean_engine.client.volumes()["Volumes"]


def test_base_image_is_precompiled_and_has_an_sbom(
    clean_engine: PrivateEngine, images: Any
) -> None:
    """Every module that a server imports has bytecode that Python takes as it is."""
    look = "import jupyterlab.labapp, jupyterhub.singleuser, sys, os.path"
    stale = "[n for n, m in list(sys.modules.items()) if (f := getattr(m, '__file__', None))"
    stale += " and f.endswith('.py') and (c := getattr(m, '__cached__', None)) and not fresh(f, c)]"
    fresh = "int.from_bytes(open(c, 'rb').read(16)[8:12], 'little') == int(os.path.getmtime(f))"
    code = f"{look}; fresh = lambda f, c: os.path.exists(c) and {fresh}; print({stale})"
    assert shell(clean_engine, images.BASE, f'python -B -c "{code}"') == "[]"
    parts = images.listed(clean_engine, images.BASE)
    assert f"pkg:pypi/jupyterhub@{version('jupyterhub')}" in parts
    assert any(part.startswith("pkg:deb/debian/tini@") for part in parts)
    assert images.locked(REPO / "images" / "base" / "requirements.lock") <= parts


@pytest.mark.usefixtures("soak")
@pytest.mark.parametrize(
    "name, lock",
    [
        ("minimal-cpu", "requirements.lock"),
        ("pytorch", "requirements.lock"),
        ("jax", "cpu.lock"),
        ("jax", "requirements.lock"),
        ("tensorflow", "cpu.lock"),
        ("tensorflow", "requirements.lock"),
        ("rapids", "requirements.lock"),
    ],
)
def test_image_builds_from_its_lock_and_passes_its_smoke_test(
    clean_engine: PrivateEngine, images: Any, name: str, lock: str
) -> None:
    tag, folder = f"gpuspawner/{name}:test", REPO / "images" / name
    base = images.DEBIAN if name == "minimal-cpu" else images.BASE
    images.build(clean_engine, images.Recipe(tag, folder, base, {"LOCK": lock}))
    try:
        found = smoke(clean_engine.client, tag)
        assert passed(found), found
        assert images.locked(folder / lock) <= images.listed(clean_engine, tag)
        if name == "pytorch":
            # The stand-in hook gives a device and no driver: nothing for torch to count.
            given = smoke(clean_engine.client, tag, mode="device_requests", uuids=[DEVICES[0]])
            assert passed(given), given
            assert given[-4].text.startswith("1; no driver library here")
    finally:
        clean_engine.client.remove_image(tag, force=True)  # gigabytes


@pytest.mark.usefixtures("soak")
def test_build_script_builds_newest_versions_and_tries_the_image(
    clean_engine: PrivateEngine, images: Any
) -> None:
    tag = "gpuspawner/newest:test"
    words = [w for k, v in images._proxies().items() for w in ("--build-arg", f"{k}={v}")]
    command = [sys.executable, str(REPO / "images" / "build"), "minimal-cpu", "--newest", "--smoke"]
    command += ["--tag", tag, "--base-image", images.DEBIAN]
    command += [f"--docker={shlex.join(['--network', 'host', *words])}"]
    environment = os.environ | {"DOCKER_HOST": clean_engine.url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    try:
        named = shell(clean_engine, tag, "ls /opt/gpuspawner; jupyterhub-singleuser --version")
        assert named.splitlines() == [
            "lab",
            "minimal-cpu",
            "sbom.cdx.json",
            "seal.py",
            "singleuser.py",
            version("jupyterhub"),
        ]
    finally:
        clean_engine.client.remove_image(tag, force=True)


@pytest.mark.usefixtures("soak")
def test_ngc_image_adds_a_server_and_keeps_what_its_base_brings(
    clean_engine: PrivateEngine, images: Any
) -> None:
    images.build(clean_engine, images.recipes()[images.NGC_BASE])
    recipe = images.Recipe("gpuspawner/ngc:test", REPO / "images" / "ngc", images.NGC_BASE)
    images.build(clean_engine, recipe)
    found = smoke(clean_engine.client, recipe.tag)
    assert passed(found), found
    look = "id -un; echo ~; echo $PIP_CONSTRAINT; python -c 'import numpy; print(numpy.__file__)'"
    assert shell(clean_engine, recipe.tag, look).splitlines() == [
        "entered",
        "jovyan",
        "/home/jovyan",
        "/etc/pip-constraint.txt",
        "/usr/lib/python3/dist-packages/numpy/__init__.py",
    ]
