"""The Hub's frame around the service's pages: its page.html, with the admin's own templates."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jupyterhub._data import DATA_FILES_PATH
from markupsafe import Markup
from tornado import httputil
from tornado.web import GZipContentEncoding

VARIABLE = "GPUSPAWNER_FRAME"
"""The environment variable by which the hub's configuration passes its frame to the service."""

HUB_TEMPLATES = Path(DATA_FILES_PATH) / "templates"

OUR_TEMPLATES = Path(__file__).parent.parent / "spawners" / "hub_templates"
"""Templates that gpuspawner adds to the Hub."""

STATIC = Path(__file__).parent / "static"
"""Style and scripts of ours, which the service and the Hub serve."""

TEMPLATE = "gpu_service.html"

log = logging.getLogger(__name__)

_LOADS = re.compile(r"<(script|style|link)(?=[\s>])")


@dataclass(frozen=True, slots=True)
class TemplateUser:
    """The signed-in member, as the Hub's templates know one."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def json_escaped_name(self) -> str:
        """The name as it stands in a JavaScript string."""
        return json.dumps(self.name)[1:-1].replace("<", "\\u003c")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the Hub and the service are."""

    hub_url: str
    """The Hub's URL, such as ``/hub/``."""
    service_url: str
    """The service's, such as ``/services/gpu/``."""
    hub_host: str = ""
    """The Hub's host if the service has a domain of its own."""


@dataclass(frozen=True)
class Frame:
    """The hub's settings of its pages, in whose frame the service's pages are."""

    template_paths: Sequence[str] = (str(OUR_TEMPLATES),)
    template_vars: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> Frame:
        """Read what :meth:`to_text` wrote; an empty text is the default."""
        return cls(**json.loads(text)) if text else cls()

    def to_text(self) -> str:
        """Return the frame as JSON."""
        return json.dumps(
            {"template_paths": list(self.template_paths), "template_vars": self.template_vars}
        )

    def page(
        self,
        place: Place,
        *,
        title: str,
        here: str,
        content: str,
        user: str = "",
        admin: bool = False,
    ) -> tuple[str, str]:
        """Return a page and its Content-Security-Policy.

        Args:
            place: Where the Hub and the service are.
            title: The page's title, escaped.
            here: The page's name in the navigation; empty if it is not there.
            content: What stands in the frame, escaped.
            user: The signed-in member's name; empty if nobody is.
            admin: True if the member is an admin of the Hub.
        """
        nonce, marker = secrets.token_urlsafe(16), secrets.token_hex(16)
        values = self._values(place, user, admin)
        values |= {"page_title": Markup(title), "here": here, "content": marker}  # nosec B704
        html = self._rendered(values)
        # The content comes after the nonces: it never gets one, even if something in it should
        # not be escaped.
        html = _LOADS.sub(rf'<\1 nonce="{nonce}"', html).replace(marker, content)
        return html, policy(nonce, place.hub_host)

    def _rendered(self, values: Mapping[str, Any]) -> str:
        try:
            return self._templates.get_template(TEMPLATE).render(values)
        except Exception as error:  # an admin's template may do anything
            what = f"{type(error).__name__}: {error}"
            log.warning("template_paths cannot be used for the service's pages: %s", what)
            return _SHIPPED._templates.get_template(TEMPLATE).render(values)

    @cached_property
    def _templates(self) -> jinja2.Environment:
        """The templates that the Hub would use.

        As in the Hub, ``templates/page.html`` is JupyterHub's own, and ``page.html`` the admin's.
        """
        hub = str(HUB_TEMPLATES)
        loader = jinja2.ChoiceLoader(
            [
                jinja2.PrefixLoader({"templates": jinja2.FileSystemLoader(hub)}),
                jinja2.FileSystemLoader([*self.template_paths, str(OUR_TEMPLATES), hub]),
            ]
        )
        return jinja2.Environment(loader=loader, autoescape=True)

    def _values(self, place: Place, user: str, admin: bool) -> dict[str, Any]:
        """Return what the Hub's page.html is rendered with."""

        def static_url(path: str, include_version: bool = True) -> str:
            return f"{place.hub_url}static/{path}"

        return {
            "base_url": place.hub_url,
            "prefix": place.hub_url.removesuffix("hub/"),
            "service_url": place.service_url,
            "user": TemplateUser(user) if user else None,
            "login_url": f"{place.hub_url}login",
            "logout_url": f"{place.hub_url}logout",
            "login_service": None,
            "static_url": static_url,
            "version_hash": "",
            "services": [],
            "parsed_scopes": {"admin-ui": {}} if admin else {},
            "expanded_scopes": set(),
            "admin_access": False,
            "no_spawner_check": True,
            "xsrf_token": "",  # the service has its own  # nosec B105
            **self.template_vars,
        }


_SHIPPED = Frame()
"""Without an admin's templates."""


def passed_on(template_paths: Sequence[str], template_vars: Mapping[str, Any]) -> Frame:
    """Return the frame that can be passed to the service: without variables that are functions."""
    plain = {}
    for name, value in template_vars.items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue  # it is computed for each user, which only the Hub can do
    return Frame(tuple(template_paths), plain)


def policy(nonce: str, hub_host: str = "") -> str:
    """Return the Content-Security-Policy of a page whose scripts and styles carry ``nonce``.

    Whatever the Hub's and the admin's templates load is allowed, and the service's own files.
    """
    here = f"'self' {hub_host}".strip()
    return (
        f"default-src 'none'; script-src {here} 'nonce-{nonce}'; style-src {here} 'nonce-{nonce}'; "
        f"style-src-attr 'unsafe-inline'; img-src {here} data: https:; font-src {here} https:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


class StaticGzip(GZipContentEncoding):
    """Compresses files below ``static/``, which are the same for everybody.

    Pages are not compressed: their compressed length could reveal private data of the reader.
    """

    def __init__(self, request: httputil.HTTPServerRequest) -> None:
        super().__init__(request)
        self._static = "/static/" in request.path and "Range" not in request.headers

    def transform_first_chunk(
        self, status_code: int, headers: httputil.HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, httputil.HTTPHeaders, bytes]:
        """Compress a static file, and leave any other response as it is."""
        if self._static:
            return super().transform_first_chunk(status_code, headers, chunk, finishing)
        self._gzipping = False
        return status_code, headers, chunk
