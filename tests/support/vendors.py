"""Identity providers that no test can reach: a local server that answers in their shapes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from gpuspawner.auth import MemberMixin
from tests.support.processes import REPO

CLIENT = "hub-of-the-lab"


class Vendor:
    """Answers by path: JSON with 200, a status alone, or 404 for what nobody asked it to know."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, Any] = {}

    def token(self, **claims: Any) -> None:
        """Every code is good for an access token, and for an id token with these claims."""
        now = int(time.time())
        whole = {"aud": CLIENT, "iat": now, "nbf": now, "exp": now + 3600, **claims}
        self.answers["/token"] = {
            "access_token": "access",
            "token_type": "bearer",
            "refresh_token": "refresh",
            "id_token": jwt.encode(whole, "a key of the tests, of 32 letters", "HS256"),
            "scope": "openid",
        }


@contextmanager
def vendor() -> Iterator[Vendor]:
    """A server that speaks for a vendor."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            said = standing_in.answers.get(self.path.split("?")[0], 404)
            body = b"" if isinstance(said, int) else json.dumps(said).encode()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(said if isinstance(said, int) else 200)
            if said != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    standing_in = Vendor(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield standing_in
    finally:
        server.shutdown()
        server.server_close()


def recipe(name: str) -> Config:
    """The settings of a recipe for admins."""
    return PyFileConfigLoader(f"{name}.py", path=str(REPO / "hub_config" / "auth")).load_config()


def from_recipe(
    kind: type[MemberMixin], name: str, settings: dict[str, Any], **kwargs: Any
) -> MemberMixin:
    """The authenticator of a recipe, with some settings changed, without the browser's way."""

    def straight(self: MemberMixin, handler: Any, data: Any = None) -> Any:
        return {"code": "code"}

    made = type(kind.__name__, (kind,), {"build_access_tokens_request_params": straight})
    config = recipe(name)
    config[kind.__name__].update({"client_id": CLIENT, "client_secret": "secret", **settings})
    found: MemberMixin = made(config=config, **kwargs)
    return found
