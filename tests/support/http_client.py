"""A client that keeps cookies, as a browser does."""

from __future__ import annotations

import requests


def new_session() -> requests.Session:
    """A session whose requests have a connection each.

    The proxy closes a connection some seconds after its last request. A browser that sends
    the next one just then sends it again; ``requests`` raises ``ConnectionResetError``.
    """
    session = requests.Session()
    session.headers["Connection"] = "close"
    return session
