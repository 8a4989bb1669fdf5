"""A hub for members with work to do: servers in Docker, sign-in by your identity provider.

docs/how-to/production/run-it-in-compose.md starts it; `gpuspawner init` writes one like it.
"""

import os
import sys
from pathlib import Path

import gpuspawner

c = get_config()


def secret(name: str) -> str:
    """The variable NAME, or what is in the file NAME_FILE, which nobody else may read."""
    path = Path(os.environ.get(f"{name}_FILE", ""))
    by_systemd = str(path.parent) == os.environ.get("CREDENTIALS_DIRECTORY")  # closed by ACLs
    if path.name and not by_systemd and path.stat().st_mode & 0o077:
        sys.exit(f"Others can read the secret in {path}. Close it first: chmod 600 {path}")
    return path.read_text(encoding="utf-8").strip() if path.name else os.environ.get(name, "")


# Who: members of a group of your identity provider. Its addresses are in the environment:
# OAUTH2_AUTHORIZE_URL, OAUTH2_TOKEN_URL, OAUTH2_USERDATA_URL, OAUTH_CALLBACK_URL, OAUTH_CLIENT_ID.
# With JUPYTERHUB_CRYPT_KEY, who left a group there is out here after minutes. Others: auth/*.py.
c.JupyterHub.authenticator_class = "gpu-members-oauth"
c.MemberOAuthenticator.login_service = "Example Lab"  # the name on the button
c.MemberOAuthenticator.client_secret = secret("OAUTH_CLIENT_SECRET")
c.MemberOAuthenticator.scope = ["openid", "profile", "groups"]
c.MemberOAuthenticator.username_claim = "preferred_username"
c.MemberOAuthenticator.manage_groups = True  # the "groups" claim becomes the hub's groups
c.MemberOAuthenticator.allowed_groups = {"gpu-members"}
c.MemberOAuthenticator.admin_groups = {"gpu-admins"}
c.MemberOAuthenticator.contact = "gpu-admin@example.org"

# Where: the proxy runs beside the hub, and servers outlive a restart of the hub.
c.JupyterHub.cleanup_servers = False
c.JupyterHub.hub_bind_url = os.environ.get("HUB_BIND_URL", "http://172.30.0.1:8081")
c.JupyterHub.hub_connect_url = os.environ.get("HUB_CONNECT_URL", c.JupyterHub.hub_bind_url)
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = os.environ.get("PROXY_API_URL", "http://127.0.0.1:8001")
c.ConfigurableHTTPProxy.auth_token = secret("CONFIGPROXY_AUTH_TOKEN")

# What: environments, in containers that are made anew each time, with a workspace that stays.
c.JupyterHub.spawner_class = "gpu-docker"
c.GPUSpawnerMixin.catalog = str(Path(__file__).with_name("catalog.yaml"))
c.GPUDockerSpawner.workspace = "gpuspawner-work-{username}"  # or "/srv/workspaces/{username}"
c.DockerSpawner.network_name = "gpuspawner"
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.remove = True
c.DockerSpawner.mem_limit = "32G"
c.DockerSpawner.cpu_limit = 8
c.GPUDockerSpawner.capabilities = []  # for images that start as root, take this line out

# What it costs. For many members, PostgreSQL: postgresql://gpuspawner@db.example.org/gpuspawner
c.GPUDatabase.url = os.environ.get("GPUSPAWNER_DATABASE_URL", "sqlite:///gpuspawner.sqlite")
c.GPURates.by_model = {"*": 1, "A100": 4, "H100": 8}
service = os.environ.get("SERVICE_URL", "http://127.0.0.1:10190")
gpuspawner.add_services(c, url=service, cull_idle_after=4 * 3600)
