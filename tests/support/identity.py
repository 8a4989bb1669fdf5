"""A real OpenID Connect identity provider (canaille) on a free loopback port.

It lives in a virtual environment of its own below the test cache, so that its dependencies
never meet the hub's. Everything it knows comes from files that are written here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import requests
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from tests.support.processes import (
    LIVE,
    alive,
    die_with_us,
    end_process,
    free_port,
    kept_dir,
    one_at_a_time,
    run,
    wait_for,
)

REQUIREMENT = "canaille[front,oidc,server,sqlite]==0.3.6"
CLIENT_ID = "gpu-hub"
CLIENT_SECRET = "a-secret-of-the-tests"

CONFIG = """\
SECRET_KEY = "only-for-this-test-run"
PREFERRED_URL_SCHEME = "http"
[CANAILLE]
NAME = "Lab"
DATABASE = "sql"
CAPTCHA_ENABLED = false
JAVASCRIPT = false
HTMX = false
[CANAILLE_SQL]
DATABASE_URI = "sqlite:///{folder}/identity.sqlite"
PASSWORD_HASH_PARAMS = {{ pbkdf2_sha512__rounds = 1000 }}
[CANAILLE_OIDC]
REQUIRE_NONCE = false
ACTIVE_JWKS = [{{ {jwk} }}]
[CANAILLE_HYPERCORN]
WORKERS = 0
"""

PROGRAM = """
import sys
from canaille.commands import cli
for command in sys.argv[1:]:
    cli(command.split(), standalone_mode=False)
"""
"""Runs several commands of canaille in one process: its imports take longer than any command."""


def password_of(user: str) -> str:
    """The password that a provider or a directory knows for a user."""
    return f"the-password-of-{user}"


class IdentityProvider:
    """Users and their groups, served as OpenID Connect.

    ``users`` maps a user's name to the groups they are in. ``redirect_uri`` is where the hub
    wants members sent back to, such as ``http://127.0.0.1:8000/hub/oauth_callback``.
    """

    name = "identity provider"

    def __init__(
        self, folder: Path, *, users: Mapping[str, Sequence[str]], redirect_uri: str
    ) -> None:
        self.folder = folder
        self.users = users
        self.redirect_uri = redirect_uri
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.authorize_url = f"{self.url}/oauth/authorize"
        self.token_url = f"{self.url}/oauth/token"
        self.userdata_url = f"{self.url}/oauth/userinfo"
        self._log = folder / "identity.log"
        self.signed_in: dict[str, int] = {}
        """In which second each user last signed in."""
        self._process: subprocess.Popen[bytes] | None = None
        self._python = _installed()
        folder.mkdir(parents=True, exist_ok=True)
        key = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048), as_dict=True)
        del key["key_ops"]  # a list, which canaille does not take
        jwk = ", ".join(f"{name} = {json.dumps(value)}" for name, value in key.items())
        config = CONFIG.format(folder=folder, jwk=jwk)
        (folder / "canaille.toml").write_text(config)
        (folder / "content.json").write_text(json.dumps(self._content()))

    def _content(self) -> dict[str, list[dict[str, object]]]:
        ids = {user: str(uuid.uuid4()) for user in self.users}
        groups = {group for of_user in self.users.values() for group in of_user}
        return {
            "user": [
                {
                    "id": ids[user],
                    "user_name": user,
                    "password": password_of(user),
                    "family_name": user,
                    "emails": [f"{number}@lab.example"],
                }
                for number, user in enumerate(self.users)
            ],
            "group": [
                {
                    "id": str(uuid.uuid4()),
                    "display_name": group,
                    "members": [ids[user] for user in self.users if group in self.users[user]],
                }
                for group in sorted(groups)
            ],
            "client": [
                {
                    "id": str(uuid.uuid4()),
                    "client_id": CLIENT_ID,
                    "client_secret": CLIENT_SECRET,
                    "client_name": "GPU hub",
                    "client_uri": "http://127.0.0.1",  # trusted: no page that asks for consent
                    "redirect_uris": [self.redirect_uri],
                    "grant_types": ["authorization_code", "refresh_token"],
                    "response_types": ["code"],
                    "scope": ["openid", "profile", "groups"],
                    "token_endpoint_auth_method": "client_secret_post",
                }
            ],
        }

    def start(self) -> None:
        """Start, fill it the first time, and return once its discovery document can be read."""
        is_filled = (self.folder / "identity.sqlite").exists()
        commands = [] if is_filled else ["install", "restore"]
        commands.append(f"run --bind 127.0.0.1:{self.port}")
        with self._log.open("ab") as log, (self.folder / "content.json").open() as content:
            self._process = subprocess.Popen(
                die_with_us([str(self._python), "-c", PROGRAM, *commands]),
                cwd=self.folder,
                stdin=content,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        LIVE.append(self)
        wait_for(self._answers, "the identity provider", timeout=30)

    def _answers(self) -> bool:
        if self._process is None or not alive(self._process.pid):
            raise RuntimeError(f"the identity provider ended:\n{self.log_text()}")
        try:
            with urllib.request.urlopen(f"{self.url}/.well-known/openid-configuration") as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self) -> None:
        """End it; the port answers nobody from then on."""
        if self._process is not None:
            end_process(self._process.pid)
            self._process.wait()
            self._process = None
        if self in LIVE:
            LIVE.remove(self)

    def wait_turn(self, user: str) -> None:
        """Wait for a new second: in the same one canaille makes the same token and refuses it."""
        wait_for(lambda: int(time.time()) != self.signed_in.get(user), "a new second")

    def leave_groups(self, user: str) -> None:
        """Take someone out of all their groups while the provider runs."""
        with closing(sqlite3.connect(self.folder / "identity.sqlite", timeout=20)) as database:
            mine = "user_id = (SELECT id FROM user WHERE user_name = ?)"
            database.execute(f"DELETE FROM membership_association_table WHERE {mine}", [user])
            database.commit()

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class _Form(HTMLParser):
    """The first form of a page that posts: where to, and its hidden fields."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if tag == "form" and self.action is None and found.get("method", "").lower() == "post":
            self.action = found.get("action", "")
        elif tag == "input" and self.action is not None and found.get("type") == "hidden":
            self.fields.setdefault(found.get("name", ""), found.get("value", ""))


def sign_in(
    session: requests.Session, provider: IdentityProvider, user: str, hub_url: str
) -> requests.Response:
    """Sign in at the hub through the provider, as a browser without scripts would.

    Follows redirects and fills in the provider's forms. Returns the page that the
    authorization-code flow ended on, whichever server sent it.
    """
    provider.wait_turn(user)
    page = session.get(f"{hub_url}/hub/oauth_login", timeout=60)
    for field, answer in (("login", user), ("password", password_of(user))):
        if not page.url.startswith(provider.url):
            break  # the provider still knows this browser
        form = _Form(page.text)
        if form.action is None:
            break
        fields = {**form.fields, field: answer}
        page = session.post(urljoin(page.url, form.action), data=fields, timeout=60)
    provider.signed_in[user] = int(time.time())
    return page


def _installed() -> Path:
    """A Python with canaille, installed on the first call; parallel runs wait for one another."""
    python = f"{sys.version} {sys.base_prefix}"
    home = kept_dir() / f"identity-{hashlib.sha256(python.encode()).hexdigest()[:16]}"
    done = home / "installed"
    with one_at_a_time(home.name):
        if not done.exists() or done.read_text() != REQUIREMENT:
            shutil.rmtree(home, ignore_errors=True)
            run([sys.executable, "-m", "venv", home])
            run([home / "bin" / "pip", "install", "--quiet", REQUIREMENT])
            done.write_text(REQUIREMENT)
    return home / "bin" / "python"
