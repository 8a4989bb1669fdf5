"""A member at a hub, over HTTP as their browser: cookies, XSRF tokens, forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import requests

from tests.support import page_text
from tests.support.http_client import new_session
from tests.support.hub import NAVIGATION
from tests.support.kernel import Kernel
from tests.support.processes import wait_for


class Visitor:
    """``Visitor("http://127.0.0.1:8000", "member1", "password")`` is signed in.

    Knows nothing of the hub but its address: no token of an admin's, no file. Who signed in
    by another way than the hub's own form brings their ``session``.
    """

    def __init__(
        self, url: str, name: str, password: str = "", session: requests.Session | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.session = session or new_session()
        if session is None:
            self._sign_in(password)

    def _sign_in(self, password: str) -> None:
        name = self.name
        page = self.post("/hub/login?next=/hub/home", {"username": name, "password": password})
        if "/hub/login" in page.url or page.status_code >= 400:
            raise PermissionError(f"{name} was not signed in: {page.status_code} {text_of(page)}")

    def get(self, path: str) -> requests.Response:
        """Open a page by a link."""
        return self.session.get(self.url + path, headers=NAVIGATION, timeout=60)

    def post(self, path: str, fields: Mapping[str, Any]) -> requests.Response:
        """Open a page with a form, and send the form."""
        shown = self.get(path)
        found = re.search(r'name="_xsrf"\s+value="([^"]+)"', shown.text)
        data = {**fields, "_xsrf": found[1] if found else self._xsrf()}
        return self.session.post(self.url + path, data=data, headers=NAVIGATION, timeout=120)

    def api(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Call the hub's API as the hub's own pages do."""
        headers = {"X-XSRFToken": self._xsrf(), "Sec-Fetch-Mode": "cors"}
        url = f"{self.url}/hub/api/{path}"
        return self.session.request(method, url, headers=headers, timeout=60, **kwargs)

    def spawn(self, fields: Mapping[str, Any], timeout: float = 90.0) -> dict[str, Any]:
        """Send the spawn form and wait until the server is ready; what the hub says of it."""
        answer = self.post("/hub/spawn", fields)
        # A server that is up at once answers itself, and may have no page where the hub leads to.
        if answer.status_code >= 400 and answer.url.startswith(f"{self.url}/hub/"):
            raise RuntimeError(f"the spawn was refused: {text_of(answer)}")

        def look() -> dict[str, Any] | None:
            server = self.server()
            if server is None:
                raise RuntimeError(f"the spawn failed: {text_of(self.get('/hub/spawn-pending'))}")
            return server if server["ready"] else None

        return wait_for(look, f"{self.name}'s server", timeout=timeout)

    def server(self) -> dict[str, Any] | None:
        """What the hub says of the default server; None when it does not run."""
        answer = self.api("GET", f"users/{self.name}")
        answer.raise_for_status()
        found: dict[str, Any] | None = answer.json()["servers"].get("")
        return found

    def stop(self, timeout: float = 60.0) -> None:
        """Stop the default server and wait until it is gone."""
        self.api("DELETE", f"users/{self.name}/server").raise_for_status()
        wait_for(lambda: self.server() is None, f"{self.name}'s stop", timeout=timeout)

    def run(self, code: str, timeout: float = 60.0) -> str:
        """Run code in a new kernel of the running server; what it printed."""
        with Kernel(f"{self.url}/user/{self.name}", self._token(), timeout) as kernel:
            return kernel.run(code)

    def files(self) -> list[str]:
        """What the file browser of the running server lists when it opens."""
        url = f"{self.url}/user/{self.name}/api/contents"
        headers = {"Authorization": f"token {self._token()}"}
        answer = requests.get(url, headers=headers, timeout=60)
        answer.raise_for_status()
        return [each["name"] for each in answer.json()["content"]]

    def _token(self) -> str:
        made = self.api("POST", f"users/{self.name}/tokens", json={"note": "a test"})
        made.raise_for_status()
        return str(made.json()["token"])

    def _xsrf(self) -> str:
        return self.session.cookies.get("_xsrf", "", path="/hub/") or ""


def text_of(page: requests.Response) -> str:
    """What a person reads on the page: no markup, single spaces."""
    return page_text.text_of(page.text)
