"""A hub to try gpuspawner out with: simulated GPUs, shared passwords, everything in one folder.

`make demo` runs it and sets the variables below. By itself it runs too:

    GPUSPAWNER_DEMO_PASSWORD=at-least-8-characters jupyterhub -f hub_config/try_out.py

For members with work to do, see jupyterhub_config.py beside this file.
"""

import os
import sys
from pathlib import Path

import gpuspawner

c = get_config()

HERE = Path(__file__).resolve().parent


def setting(name: str, default: str = "") -> str:
    """A variable GPUSPAWNER_DEMO_..., or its default when it is not set or empty."""
    return os.environ.get(f"GPUSPAWNER_DEMO_{name}") or default


folder = Path(setting("DIR", ".demo")).resolve()
folder.mkdir(parents=True, exist_ok=True, mode=0o700)
if not setting("PASSWORD"):
    sys.exit("Set GPUSPAWNER_DEMO_PASSWORD to the password that members sign in with.")

# Where everything is: one folder, and four ports of this machine only.
c.JupyterHub.bind_url = f"http://127.0.0.1:{setting('PORT', '8000')}/"
c.JupyterHub.hub_port = int(setting("HUB_PORT", "8081"))
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{setting('PROXY_PORT', '8001')}"
c.ConfigurableHTTPProxy.pid_file = str(folder / "proxy.pid")
proxy = Path(sys.executable).with_name("configurable-http-proxy")
c.ConfigurableHTTPProxy.command = [str(proxy if proxy.exists() else proxy.name)]
c.JupyterHub.cookie_secret_file = str(folder / "cookie-secret")
c.JupyterHub.db_url = f"sqlite:///{folder}/jupyterhub.sqlite"

# Who: eight members with one password, and an admin with a longer one.
c.JupyterHub.authenticator_class = "gpu-members-shared-password"
c.MemberSharedPasswordAuthenticator.user_password = setting("PASSWORD")
c.MemberSharedPasswordAuthenticator.admin_password = setting("ADMIN_PASSWORD")
c.MemberSharedPasswordAuthenticator.allowed_users = {f"member{n}" for n in range(1, 9)}
c.MemberSharedPasswordAuthenticator.admin_users = {"admin"}

# What: GPUs, their rates, and the environments.
c.GPUDatabase.url = f"sqlite:///{folder}/gpuspawner.sqlite"
c.GPUDevices.source = setting("GPUS", "simulated:2xA100-80GB,2xT4")
c.GPURates.by_model = {"*": 1, "T4": "0.5", "A100": 4, "H100": 8, "H200": 10}
c.GPUSpawnerMixin.catalog = setting("CATALOG", str(HERE / "catalog.yaml"))
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120

if address := setting("DOCKER_ADDRESS"):
    # In containers, which reach the hub at this machine's address on their network.
    name = f"gpuspawner-demo-{setting('NAME', 'hub')}"
    c.JupyterHub.spawner_class = "gpu-docker"
    c.JupyterHub.hub_ip = address
    c.DockerSpawner.prefix = name
    c.DockerSpawner.remove = True
    c.DockerSpawner.extra_create_kwargs = {"labels": {"gpuspawner.demo": name}}
    c.GPUDockerSpawner.workspace = f"{name}-work-{{username}}"
else:
    # As processes of this very user: nothing keeps one member from another.
    c.JupyterHub.spawner_class = "gpu-local"
    c.GPULocalSpawner.workspace = f"{folder}/workspaces/{{username}}"

    def link_datasets(spawner) -> None:
        """~/datasets leads to the sample; only its files' mode keeps it from being written."""
        link = Path(spawner.home_dir, "datasets")
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / "datasets").exists() and not os.path.lexists(link):
            link.symlink_to(folder / "datasets")

    c.GPULocalSpawner.pre_spawn_hook = link_datasets

    # The item of JupyterLab that says what a GPU does; images have it in their own.
    lab = HERE.parent / "images" / "common" / "lab"
    c.GPULocalSpawner.environment = {
        "JUPYTER_PATH": str(lab / "share" / "jupyter"),
        "JUPYTER_CONFIG_PATH": str(lab / "etc" / "jupyter"),
        "PYTHONPATH": str(lab),
    }

# The accounting service, and the idle culler after two hours.
service = f"http://127.0.0.1:{setting('SERVICE_PORT', '10190')}"
gpuspawner.add_services(c, url=service, cull_idle_after=2 * 3600)
