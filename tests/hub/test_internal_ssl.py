"""``internal_ssl`` with our services. Real: hub, proxy, services, Docker Engine, JupyterLab."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.client import Client
from gpuspawner.leases.models import LeaseState
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import NAVIGATION
from tests.support.processes import free_port, wait_for

CONFIG = """
c.JupyterHub.internal_ssl = True
c.JupyterHub.trusted_alt_names = ["IP:{gateway}"]
c.JupyterHub.hub_bind_url = c.JupyterHub.hub_bind_url.replace("http:", "https:")
c.ConfigurableHTTPProxy.api_url = c.ConfigurableHTTPProxy.api_url.replace("http:", "https:")
c.DockerSpawner.use_internal_hostname = False  # no name service leads this machine to containers
c.DockerSpawner.use_internal_ip = False
c.DockerSpawner.move_certs_image = {helper!r}
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}", cull_idle_after=3600)
"""

CATALOG = """
environments:
  - {{slug: lab, image: {image}, default: true}}
"""

ASK_HUB = """
import json, os, ssl, urllib.request
context = ssl.create_default_context(cafile=os.environ["JUPYTERHUB_SSL_CLIENT_CA"])
certificate = os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"]
context.load_cert_chain(*certificate)
lease = os.environ["GPUSPAWNER_LEASE_ID"]
url = os.environ["JUPYTERHUB_API_URL"] + f"/gpuspawner/leases/{lease}/"
token = {"Authorization": "token " + os.environ["JUPYTERHUB_API_TOKEN"]}
request = urllib.request.Request(url + "now", headers=token)
answer = urllib.request.urlopen(request, context=context)
print(json.dumps([url, json.load(answer)]))
"""


def test_all_components_work_with_internal_ssl(
    hubs: None,
    clean_engine: PrivateEngine,
    images: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIG.format(gateway=clean_engine.gateway, helper=images.EXITS, port=free_port())
    catalog = CATALOG.format(image=images.BASE)
    with GPUHub(tmp_path / "hub", clean_engine, config, fleet="1xT4", catalog=catalog) as hub:
        # The server gets its certificates and its GPU, and the Hub and the proxy reach it.
        hub.spawn_and_wait("ada", {"gpus": 1})
        (container,) = hub.containers()
        assert container["Image"] == images.BASE, "the helper for certificates holds no lease"
        (lease,) = hub.open_leases("ada")
        assert lease.state is LeaseState.RUNNING and lease.engine_ref == container["Id"]

        # From the server by the Hub to the service.
        url, now = json.loads(hub.kernel_run("ada", ASK_HUB))
        assert url.startswith(f"https://{hub.hub_ip}:")
        assert lease.id in json.dumps(now)

        # And so does the client, with the session's own environment and certificates.
        names = ("API_URL", "API_TOKEN", "SSL_CERTFILE", "SSL_KEYFILE", "SSL_CLIENT_CA")
        for name in (f"JUPYTERHUB_{each}" for each in names):
            code, value = clean_engine.execute(container["Id"], ("printenv", name))
            assert code == 0
            if "_SSL_" in name:
                _, text = clean_engine.execute(container["Id"], ("cat", value))
                value = str(tmp_path / name)
                Path(value).write_text(text)
            monkeypatch.setenv(name, value)
        assert list(Client().runs.list()) == []

        # From a browser by the proxy to the service, which asks the Hub who that is.
        page = hub.login("ada").get(f"{hub.url}/services/gpu/", headers=NAVIGATION, timeout=60)
        assert page.ok and lease.id in page.text

        # The culler asks the Hub; the service has the Hub stop the server, and settles its lease.
        culler = re.compile(r" 200 GET /hub/api/users\?.*\(idle-culler@")
        wait_for(lambda: culler.search(hub.log_text()), "the idle culler")
        token = {"Authorization": f"token {hub.user_token('ada')}"}
        ended = hub.api("POST", f"gpuspawner/leases/{lease.id}/end", headers=token)
        assert ended.ok, ended.text
        wait_for(lambda: hub.server("ada") is None, "the stop")
        wait_for(lambda: not hub.open_leases("ada"), "the release")
        assert hub.leases("ada")[0].charged > 0
        assert not hub.containers()
