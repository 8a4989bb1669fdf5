"""Sign-in from a course. Real: JupyterHub, proxy, ltiauthenticator with the recipe for admins,
signatures. The learning platform is a stand-in that speaks the launch of LTI 1.3."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import requests
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from gpuspawner.services import Services
from tests.support.brokers import migrated_bytes, services_on
from tests.support.http_client import new_session
from tests.support.hub import NAVIGATION, HubProcess
from tests.support.page_text import text_of
from tests.support.processes import REPO
from tests.support.vendors import vendor

CLIENT, LTI = "hub-of-the-lab", "https://purl.imsglobal.org/spec/lti/claim/"

CONFIG = """
load_subconfig("auth/lti.py", path={recipes!r})
c.Authenticator.allow_all = False
c.MemberLTI13Authenticator.issuer = {url!r}
c.MemberLTI13Authenticator.authorize_url = {url!r} + "/auth"
c.MemberLTI13Authenticator.jwks_endpoint = {url!r} + "/keys"
c.MemberLTI13Authenticator.client_id = {{{client!r}}}
c.GPUDatabase.url = {database!r}
c.GPUDevices.source = "simulated:1xT4"
import gpuspawner; gpuspawner.add_services(c)
c.JupyterHub.services, c.JupyterHub.load_roles = [], []  # the pages alone: nothing is charged here
"""


@dataclass
class Platform:
    """A learning platform: its keys over HTTP, and the launches that it signs."""

    url: str
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    def keys(self) -> dict[str, Any]:
        public: dict[str, Any] = RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**public, "kid": "1", "use": "sig"}]}

    def launch(
        self, hub: HubProcess, mail: str, key: rsa.RSAPrivateKey | None = None, **claims: Any
    ) -> requests.Response:
        """Follow the link in the course, as the browser of this person does."""
        session = new_session()
        session.headers.update(NAVIGATION)
        begun = session.get(
            f"{hub.url}/hub/lti13/oauth_login",
            params={
                "iss": self.url,
                "login_hint": mail,
                "target_link_uri": f"{hub.url}/hub",
                "client_id": CLIENT,
            },
            allow_redirects=False,
            timeout=60,
        )
        assert begun.headers["location"].startswith(f"{self.url}/auth?"), begun.text
        asked = {k: v[0] for k, v in parse_qs(urlsplit(begun.headers["location"]).query).items()}
        now = int(time.time())
        token = {
            "iss": self.url,
            "aud": CLIENT,
            "sub": "17",
            "email": mail,
            "nonce": asked["nonce"],
            "iat": now - 1,
            "exp": now + 300,
            f"{LTI}version": "1.3.0",
            f"{LTI}message_type": "LtiResourceLinkRequest",
            f"{LTI}deployment_id": "1",
            f"{LTI}target_link_uri": f"{hub.url}/hub",
            f"{LTI}resource_link": {"id": "5"},
            f"{LTI}roles": ["http://purl.imsglobal.org/vocab/lis/v2/membership#Learner"],
            f"{LTI}context": {"id": "3", "label": "ML", "title": "Machine learning"},
            **claims,
        }
        signed = jwt.encode(token, key or self.key, "RS256", headers={"kid": "1"})
        data = {"id_token": signed, "state": asked["state"]}
        return session.post(asked["redirect_uri"], data=data, timeout=60)


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    with vendor() as server:
        made = Platform(server.url)
        server.answers["/keys"] = made.keys()
        yield made


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[Services]:
    """Services on the hub's database, with one member on the roster."""
    file = folder / "store.sqlite"
    file.write_bytes(migrated_bytes())
    with services_on(f"sqlite:///{file}") as services:
        services.roster.import_roster(b"name,course\nada@lab.example,ML\n", actor="eva")
        yield services


@pytest.fixture(scope="module")
def hub(hubs: None, platform: Platform, services: Services, folder: Path) -> Iterator[HubProcess]:
    config = CONFIG.format(
        recipes=str(REPO / "hub_config"),
        url=platform.url,
        client=CLIENT,
        database=services.settings.database.url,
    )
    with HubProcess(folder / "hub", config) as hub:
        yield hub


def test_only_roster_members_sign_in_from_the_course(
    hub: HubProcess, platform: Platform, services: Services
) -> None:
    page = platform.launch(hub, "Ada@lab.example")
    assert page.status_code == 200, page.text
    assert page.url.endswith("/hub/welcome/first")
    assert "Welcome, ada@lab.example" in text_of(page.text)
    known = services.members.membership("ada@lab.example")
    assert known is not None and known.by_roster

    page = platform.launch(hub, "bob@lab.example")
    said = text_of(page.text)
    assert page.status_code == 403
    assert "bob@lab.example" in said and "is not on the roster" in said
    assert "gpu-admin@lab.example" in said
    assert services.members.membership("bob@lab.example") is None


def test_invalid_lti_launch_is_rejected(hub: HubProcess, platform: Platform) -> None:
    forged = rsa.generate_private_key(65537, 2048)
    assert platform.launch(hub, "ada@lab.example", forged).status_code == 400
    assert platform.launch(hub, "ada@lab.example", aud="another").status_code == 401
    assert platform.launch(hub, "ada@lab.example", nonce="used").status_code == 400
    old = int(time.time()) - 3600
    assert platform.launch(hub, "ada@lab.example", iat=old, exp=old + 300).status_code == 400
