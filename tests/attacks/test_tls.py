"""The hub behind hub_config/nginx.conf: cookies, headers, websockets, progress. Real: nginx of
Debian with a certificate of its own, hub, proxy, accounting service, a JupyterLab with a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import requests

from tests.support.attacks import Attempts
from tests.support.http_client import new_session
from tests.support.hub import NAVIGATION, USER_PASSWORD, HubProcess
from tests.support.nginx import Nginx
from tests.support.processes import free_port
from tests.support.tls import self_signed
from tests.support.visitor import Visitor

CONFIG = """
import asyncio, os
c.JupyterHub.spawner_class = "gpu-local"
c.GPUDatabase.url = "sqlite:///gpuspawner.sqlite"
c.GPUDevices.source = "simulated:1xT4"
c.Spawner.start_timeout = 240
c.Spawner.http_timeout = 240


async def wait_for_the_file(spawner):
    while not os.path.exists("go"):
        await asyncio.sleep(0.05)


c.Spawner.pre_spawn_hook = wait_for_the_file
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@dataclass
class Site:
    hub: HubProcess
    nginx: Nginx
    ca: str

    def visitor(self, name: str) -> Visitor:
        """Signed in, and known at the service."""
        session = new_session()
        session.verify = self.ca
        visitor = Visitor(self.nginx.url, name, session=session)
        visitor._sign_in(USER_PASSWORD)
        assert visitor.get("/services/gpu/").status_code == 200
        return visitor


@pytest.fixture(scope="module")
def site(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tls")
    pem = self_signed(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", str(pem))
        patch.setenv("WEBSOCKET_CLIENT_CA_BUNDLE", str(pem))
        with (
            HubProcess(folder / "hub", CONFIG.format(port=free_port())) as hub,
            Nginx(folder / "nginx", hub.port, pem) as nginx,
        ):
            yield Site(hub, nginx, str(pem))


def test_plain_http_redirects_to_https(site: Site, attempt: Attempts) -> None:
    answer = requests.get(
        f"http://127.0.0.1:{site.nginx.http}/hub/login?next=/x",
        headers={"Host": "evil.example"},
        allow_redirects=False,
        timeout=120,
    )
    assert answer.status_code == 301
    assert answer.headers["Location"] == "https://127.0.0.1/hub/login?next=/x"
    attempt("a Host of somebody else's", refused="evil" not in answer.headers["Location"])


def test_kernel_progress_and_secure_cookies_work_over_tls(site: Site, attempt: Attempts) -> None:
    ada = site.visitor("ada")
    sent = ada.post("/hub/spawn", {"gpus": "1"})
    assert sent.ok, sent.text
    url = f"{site.nginx.url}/hub/api/users/ada/server/progress"
    headers = {"X-XSRFToken": ada._xsrf(), "Sec-Fetch-Mode": "cors"}
    with ada.session.get(url, headers=headers, stream=True, timeout=240) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line[:6] == b"data: ")
        first = next(events)
        assert not first.get("ready"), "an event came while the start still waited"
        (site.hub.folder / "go").touch()
        assert any(event.get("ready") for event in events)
    assert ada.run("6 * 7", timeout=240) == "42"

    # Every cookie that the browser has now goes over TLS alone, and no script reads it.
    assert ada.get("/user/ada/lab").status_code == 200
    cookies = list(ada.session.cookies)
    assert len({cookie.path for cookie in cookies}) >= 3, cookies
    for cookie in cookies:
        attempt(f"the cookie {cookie.name} of {cookie.path} over http", refused=cookie.secure)
        hidden = cookie.name == "_xsrf" or cookie.name.startswith("jupyterhub-session")
        hidden = hidden or any(name.lower() == "httponly" for name in cookie._rest)
        attempt(f"the cookie {cookie.name} for a script", refused=hidden)
    for path in ("/hub/home", "/services/gpu/", "/user/ada/lab", "/hub/nothing-here"):
        answer = ada.get(path)
        kept = answer.raw.headers.getlist("Strict-Transport-Security")
        attempt(f"{path} by http the next time", refused=kept == ["max-age=31536000"])
        policy = answer.headers.get("Content-Security-Policy", "")
        attempt(f"{path} in a frame", refused="frame-ancestors" in policy)
    ada.stop()


def test_forged_forwarding_headers_are_ignored(site: Site, attempt: Attempts) -> None:
    forged = {
        "Forwarded": "for=203.0.113.9;proto=http",
        "X-Scheme": "http",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-For": "203.0.113.9",
        "X-Real-IP": "203.0.113.9",
        "X-Forwarded-Host": "evil.example",
    }
    for path in ("/hub/login", "/services/gpu/", "/hub/oauth_callback", "/hub/api/nothing"):
        answer = requests.get(
            site.nginx.url + path,
            headers={**forged, **NAVIGATION},
            verify=site.ca,
            allow_redirects=False,
            timeout=60,
        )
        for cookie in answer.cookies:
            attempt(f"{path}: {cookie.name} without TLS", refused=cookie.secure)
        told = answer.headers.get("Location", "") + answer.text
        attempt(f"{path}: another host", refused="evil.example" not in told)
    attempt("another address in the log", refused="203.0.113.9" not in site.hub.log_text())


def test_only_member_servers_accept_large_bodies(site: Site, attempt: Attempts) -> None:
    body = b"x" * 5 * 1024 * 1024
    for path in ("hub/login", "services/gpu/payer", "services/gpu/bulk", "hub/api/users"):
        answer = requests.post(f"{site.nginx.url}/{path}", data=body, verify=site.ca, timeout=120)
        attempt(f"5 MiB for {path}", refused=answer.status_code == 413)
    own = requests.post(f"{site.nginx.url}/user/ada/x", data=body, verify=site.ca, timeout=120)
    assert own.status_code != 413


def test_rapid_login_requests_are_rate_limited(site: Site, attempt: Attempts) -> None:
    codes = []
    with new_session() as session:
        session.verify = site.ca
        for _ in range(80):
            codes.append(session.get(f"{site.nginx.url}/hub/login", timeout=60).status_code)
            if codes[-1] == 429:
                break
    attempt("80 tries in a row", refused=codes[-1] == 429)
