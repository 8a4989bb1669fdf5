"""The plugin for TLJH on a new machine. Real: Debian 12 with systemd, packages, Docker in it,
pluggy, JupyterHub 5, TLJH's authenticator, proxy, members' kernels. It is a container with this
machine's kernel. Stand-ins: the GPUs, their driver, NVIDIA's hook, and TLJH, which no package index
has: a configuration, a unit and an installer that call the plugin as TLJH's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import images
from tests.support.box import COPY, Box
from tests.support.doc_blocks import DOCS, shell_in
from tests.support.engine import PrivateEngine
from tests.support.site import LIST, ONE_ENVIRONMENT, ONE_GPU, Site
from tests.support.visitor import Visitor

FOLDER = "/opt/tljh/config/jupyterhub_config.d"
SETTINGS = "/opt/tljh/config/config.json"
PACKAGE = "/opt/tljh/hub/lib/python3.11/site-packages/tljh"
ADMIN_PASSWORD = "of the admin's own"
REQUIREMENTS = """
pluggy==1.*
jupyterhub>=5.1,<6
jupyterhub-firstuseauthenticator>=1.1,<2
jupyterhub-idle-culler>=1.4,<2
oauthenticator>=17,<18
"""
"""As TLJH's installer has them."""

CONFIG = f"""
import json, sys
from glob import glob
c.JupyterHub.hub_port = 15001
c.JupyterHub.cleanup_servers = False
c.JupyterHub.authenticator_class = "firstuseauthenticator.FirstUseAuthenticator"
c.FirstUseAuthenticator.create_users = False
c.FirstUseAuthenticator.allow_all = True
c.Authenticator.admin_users = {{"grace"}}
c.Spawner.mem_limit = None
c.Spawner.default_url = "/lab"
seconds = json.load(open("{SETTINGS}"))["services"]["cull"]["timeout"]
culler = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={{seconds}}"]
c.JupyterHub.services = [{{"name": "cull-idle", "admin": True, "command": culler}}]
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.auth_token = "of-the-test"
for file in sorted(glob("{FOLDER}/*.py")):
    load_subconfig(file)
"""
UNIT = f"""
[Service]
User=root
Restart=always
WorkingDirectory=/opt/tljh/state
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
Environment=TLJH_INSTALL_PREFIX=/opt/tljh
ExecStart=/opt/tljh/hub/bin/python3 -m jupyterhub.app -f {PACKAGE}/jupyterhub_config.py --upgrade-db
"""
PROXY_UNIT = """
[Service]
PrivateDevices=yes
Environment=CONFIGPROXY_AUTH_TOKEN=of-the-test
ExecStart=/usr/local/bin/configurable-http-proxy --port 8000
"""
INSTALLER = f"""
import json, logging, subprocess
import pluggy
logging.basicConfig(level=logging.INFO)
manager = pluggy.PluginManager("tljh")
manager.load_setuptools_entrypoints("tljh")
settings = dict()
manager.hook.tljh_config_post_install(config=settings)
json.dump(settings, open("{SETTINGS}", "w"))
subprocess.run(["systemctl", "restart", "jupyterhub", "proxy"], check=True)
for packages in manager.hook.tljh_extra_apt_packages():
    if packages:
        subprocess.run(["apt-get", "install", "--yes", *packages], check=True)
manager.hook.tljh_post_install()
"""
INSTALL = "/opt/tljh/hub/bin/python3 /root/installer.py 2>&1"


@pytest.fixture
def box(
    soak: None, hubs: None, processes: None, engine: PrivateEngine, tmp_path: Path
) -> Iterator[Box]:
    images.ensure_images(engine, [images.BASE])
    with Box(engine, tmp_path / "copy") as box:
        box.add_gpus(2)
        yield box


def put_tljh_in(box: Box) -> None:
    """The machine as TLJH's installer leaves it, with the plugin in the hub's environment."""
    box.run("apt-get update; apt-get install python3-venv", timeout=600)
    box.run("python3 -m venv /opt/tljh/hub")
    box.run("apt-get install --no-install-recommends nodejs npm", timeout=600)
    box.run("npm install --global --prefix /usr/local 'configurable-http-proxy@^5.1'", timeout=600)
    box.write("/root/requirements.txt", REQUIREMENTS)
    box.run(f"cp -r {COPY} /usr/local/src/gpuspawner; cd /opt/tljh/hub/bin", timeout=60)
    box.run("./pip install --upgrade /usr/local/src/gpuspawner", timeout=600)
    box.run("./pip install --upgrade -r /root/requirements.txt", timeout=600)
    box.run(f"mkdir -p {PACKAGE}; touch {PACKAGE}/__init__.py; mkdir -m 700 /opt/tljh/state")
    box.run(f"mkdir -p -m 700 /opt/tljh/config {FOLDER}; touch /dev/nvidia-of-the-test")
    box.write(f"{PACKAGE}/jupyterhub_config.py", CONFIG)
    box.write("/root/installer.py", INSTALLER)
    box.write("/etc/systemd/system/jupyterhub.service", UNIT)
    box.write("/etc/systemd/system/proxy.service", PROXY_UNIT)
    box.run("systemctl daemon-reload")


def taken_out() -> str:
    """What the page says about taking it out; the box has no ``tljh-config``."""
    typed = shell_in(DOCS / "how-to/admins/put-it-on-tljh.md")[-1]
    assert "pip uninstall" in typed and "tljh-config reload" in typed
    return typed.replace("tljh-config reload", "systemctl restart jupyterhub")


def sees_gpus(box: Box, unit: str) -> bool:
    """Whether the device nodes of GPUs, of which the box has a stand-in, are there for a unit."""
    root = f"/proc/$(systemctl show --value --property MainPID {unit})/root"
    return box.run(f"ls {root}/dev | grep -c nvidia-of-the-test || true").strip() == "1"


def test_tljh_leases_gpus(box: Box) -> None:
    put_tljh_in(box)
    site = Site(box)
    printed = box.run(INSTALL, timeout=900)
    assert "Made the Docker network gpuspawner" in printed
    box.load(images.BASE, "gpuspawner/base:latest")
    box.write(f"{FOLDER}/catalog.yaml", ONE_ENVIRONMENT)
    site.wait()
    assert sees_gpus(box, "jupyterhub") and not sees_gpus(box, "proxy")
    box.run("gpuspawner check")
    assert "--timeout=14400" in box.run("pgrep --full --list-full idle_culler")

    # Who may sign in is TLJH's business.
    grace = Visitor(site.url, "grace", ADMIN_PASSWORD)
    seen = set()
    for name in ("ada", "bob"):
        with pytest.raises(PermissionError):
            Visitor(site.url, name, f"{name}'s own password")
        grace.api("POST", f"users/{name}").raise_for_status()
        member = Visitor(site.url, name, f"{name}'s own password")
        member.spawn(ONE_GPU)
        seen.add(member.run(LIST))
    assert len(seen) == 2
    assert all(name in box.run("gpuspawner devices") for name in ("ada", "bob"))

    # Another run of the installer, as for an upgrade, keeps edits and servers.
    box.run(f"echo '# edited' >> {FOLDER}/gpuspawner.py")
    box.run(INSTALL, timeout=300)
    assert "# edited" in box.run(f"tail -1 {FOLDER}/gpuspawner.py")
    site.wait()
    assert member.run(LIST) in seen

    # Taken out, it is TLJH's hub again.
    for name in ("ada", "bob"):
        Visitor(site.url, name, f"{name}'s own password").stop()
    box.run(taken_out())
    site.wait()
    assert not sees_gpus(box, "jupyterhub")
    box.run("! systemctl cat jupyterhub | grep gpuspawner; ! test -e /opt/tljh/hub/bin/gpuspawner")
