"""hub_config/jupyterhub_config.py as we ship it. Real: identity provider, proxy beside the hub,
engine, device requests; the GPUs are the stand-in library's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from tests.support import images
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.http_client import new_session
from tests.support.hub import HubProcess
from tests.support.identity import CLIENT_ID, CLIENT_SECRET, IdentityProvider, sign_in
from tests.support.nvml import nvml_library
from tests.support.processes import REPO, free_port, wait_for
from tests.support.visitor import Visitor, text_of

USERS = {"ada": ["gpu-members"], "boss": ["gpu-admins"], "eve": ["art"]}

SHIPPED = """
c.Authenticator.allow_all = False
c.Authenticator.admin_users = set()
load_subconfig({path!r})
# This provider's name of a member is in another claim than most have it in.
c.MemberOAuthenticator.username_claim = "sub"
"""

LOOK = """
import glob, json, os
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
open(os.path.expanduser("~/work/notes.txt"), "a").write("here")
print(json.dumps({
    "devices": [os.environ["NVIDIA_VISIBLE_DEVICES"], *glob.glob("/dev/nvidia[0-9]*")],
    "capabilities": int(status["CapEff"], 16),
    "no_new_privileges": status["NoNewPrivs"],
    "notes": open(os.path.expanduser("~/work/notes.txt")).read(),
}))
"""


@dataclass
class Lab:
    """A deployment as gpuspawner.service makes it: hub and proxy side by side on the host."""

    hub: HubProcess
    provider: IdentityProvider
    engine: PrivateEngine

    def member(self, name: str) -> Visitor:
        session = new_session()
        page = sign_in(session, self.provider, name, self.hub.url)
        assert page.status_code == 200, text_of(page)
        return Visitor(self.hub.url, name, session=session)

    def leases(self, name: str) -> list[Lease]:
        with services_on(f"sqlite:///{self.hub.folder}/gpuspawner.sqlite") as services:
            return services.leases.of_account(f"member:{name}")


@pytest.fixture
def lab(hubs: None, tmp_path: Path, clean_engine: PrivateEngine) -> Iterator[Lab]:
    gpus = nvml_library.gpus(2)
    clean_engine.set_devices([gpu.uuid for gpu in gpus], model=gpus[0].name)
    library = nvml_library.build_nvml_library(tmp_path / "nvml")
    nvml_library.write_fleet(tmp_path / "fleet", gpus)
    clean_engine.client.create_network("gpuspawner", driver="bridge")
    gateway = clean_engine.client.inspect_network("gpuspawner")["IPAM"]["Config"][0]["Gateway"]

    shipped = REPO / "hub_config"
    config = tmp_path / "etc" / "jupyterhub_config.py"
    config.parent.mkdir()
    config.write_text((shipped / config.name).read_text())
    catalog = (shipped / "catalog.yaml").read_text().replace("gpuspawner/base:latest", images.BASE)
    (config.parent / "catalog.yaml").write_text(catalog)
    secret = config.parent / "oauth_client_secret"
    secret.write_text(f"{CLIENT_SECRET}\n")
    secret.chmod(0o600)

    hub = HubProcess(
        tmp_path / "hub",
        SHIPPED.format(path=str(config)),
        hub_ip=gateway.partition("/")[0],
        external_proxy=True,
    )
    provider = IdentityProvider(
        tmp_path / "identity", users=USERS, redirect_uri=f"{hub.url}/hub/oauth_callback"
    )
    hub.environment = {
        "DOCKER_HOST": clean_engine.url,
        "HUB_BIND_URL": f"http://{hub.hub_ip}:{hub.hub_port}",
        "PROXY_API_URL": f"http://127.0.0.1:{hub.proxy_port}",
        "SERVICE_URL": f"http://127.0.0.1:{free_port()}",
        "OAUTH_CLIENT_ID": CLIENT_ID,
        "OAUTH_CLIENT_SECRET_FILE": str(secret),
        "OAUTH_CALLBACK_URL": provider.redirect_uri,
        "OAUTH2_AUTHORIZE_URL": provider.authorize_url,
        "OAUTH2_TOKEN_URL": provider.token_url,
        "OAUTH2_USERDATA_URL": provider.userdata_url,
        **nvml_library.environment(library, tmp_path / "fleet"),
    }
    provider.start()
    try:
        with hub:
            yield Lab(hub, provider, clean_engine)
    finally:
        provider.stop()


def test_shipped_config_runs_isolated_member_servers(lab: Lab) -> None:
    refused = sign_in(new_session(), lab.provider, "eve", lab.hub.url)
    assert refused.status_code == 403 and "gpu-admin@example.org" in text_of(refused)
    lab.member("boss")
    assert lab.hub.api("GET", "users/boss").json()["admin"] is True

    ada = lab.member("ada")
    assert "2 of 2 GPUs free" in text_of(ada.get("/hub/spawn"))
    ada.spawn({"environment": "base", "gpus": "1"})
    (lease,) = lab.leases("ada")
    assert lease.state is LeaseState.RUNNING and lease.rate == 4 * MICRO
    saw: dict[str, Any] = json.loads(ada.run(LOOK))
    assert saw["devices"] == [lease.uuids[0], f"/dev/nvidia{lease.devices[0].index}"]
    assert saw["capabilities"] == 0 and saw["no_new_privileges"] == "1"

    container = lab.engine.client.inspect_container("jupyter-ada")
    host = container["HostConfig"]
    assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"]
    assert host["PidsLimit"] == 4096 and host["NetworkMode"] == "gpuspawner"
    assert host["Memory"] == host["MemorySwap"] == 32 * 2**30
    assert host["CpuQuota"] == 8 * host["CpuPeriod"]
    assert not host["PortBindings"], "servers are reached on their network only"
    assert "docker.sock" not in json.dumps(container["Mounts"])
    for secret in (CLIENT_SECRET, "OAUTH_CLIENT_SECRET", "CONFIGPROXY"):
        assert secret not in json.dumps(container["Config"]["Env"])

    # The hub restarts; the member's server goes on, reachable all the while.
    lab.hub.kill9(services=True)
    assert lab.hub.log_text()
    page = partial(ada.session.get, f"{lab.hub.url}/user/ada/api", timeout=120)
    assert page().json()["version"]
    lab.hub.restart()
    assert page().json()["version"]
    assert [each.id for each in lab.leases("ada")] == [lease.id]

    ada.stop()
    (lease,) = lab.leases("ada")
    assert lease.state is LeaseState.ENDED and lease.charged > 0
    listed = partial(lab.engine.client.containers, all=True, filters={"name": "jupyter-ada"})
    wait_for(lambda: not listed(), "the deletion, which a stop does not wait for")
    volumes = lab.engine.client.volumes()["Volumes"]
    assert [each["Name"] for each in volumes] == ["gpuspawner-work-ada"]

    ada.spawn({"environment": "cpu"})
    saw = json.loads(ada.run(LOOK))
    assert saw["devices"] == ["void"] and saw["notes"] == "here" * 2
    host = lab.engine.client.inspect_container("jupyter-ada")["HostConfig"]
    assert host["Memory"] == 4 * 2**30, "the catalog's limit goes before the hub's"
