"""Authenticators without a hub around them, and what signing in at them leads to."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from jupyterhub.auth import Authenticator
from tornado import web
from traitlets.config import Config

from gpuspawner.auth import MemberMixin, MemberOAuthenticator
from gpuspawner.services import Services
from tests.support.brokers import make_services

GROUPS: dict[str, Any] = {"manage_groups": True, "allowed_groups": {"ml-course"}}
ADA: dict[str, Any] = {"name": "ada"}
OPENING_GRANT = 25


class Believes(Authenticator):
    """Takes everybody at their word; an exception in its place is raised."""

    fresh: Any = True

    async def authenticate(self, handler: Any, data: Any) -> Any:
        if isinstance(data, Exception):
            raise data
        return dict(data) if isinstance(data, dict) else data

    async def refresh_user(self, user: Any, handler: Any = None) -> Any:
        if isinstance(self.fresh, Exception):
            raise self.fresh
        return self.fresh


class Plain(MemberMixin, Believes):
    """The mixin on an authenticator of somebody else's."""


class Claims(MemberOAuthenticator):
    """The OAuth authenticator with the provider's two answers given."""

    async def get_token_info(self, handler: Any, params: Any) -> dict[str, Any]:
        return {"access_token": "token", "token_type": "bearer", "scope": "openid"}

    def build_access_tokens_request_params(self, handler: Any, data: Any = None) -> dict[str, Any]:
        self.claims = data
        return {}

    async def token_to_user(self, token_info: Any) -> dict[str, Any]:
        return dict(self.claims)


def open_services(folder: Path, migrated_file: Path) -> Services:
    """Services on a database file of its own, ``store.sqlite``. Close its store."""
    return make_services(
        database_url=f"sqlite:///{shutil.copy(migrated_file, folder / 'store.sqlite')}",
        device_source="simulated:1xT4",
        opening_grant=OPENING_GRANT,
    )


def accounts(services: Services) -> dict[str, int]:
    return {account.name: account.balance for account in services.ledger.accounts()}


def make(
    kind: type[MemberMixin], settings: dict[str, Any], folder: Path | None = None, **kwargs: Any
) -> MemberMixin:
    """An authenticator; its database is in the folder, which one that asks no database lacks."""
    config = Config()
    if folder is not None:
        config.GPUDatabase.url = f"sqlite:///{folder}/gpuspawner.sqlite"
    config[kind.__name__] = Config(settings)
    return kind(config=config, **kwargs)


def sign_in(authenticator: MemberMixin, typed: Any) -> str:
    """What the member sees: ``in``, ``in as admin``, ``wrong``, or a page's status and text."""
    try:
        model = asyncio.run(authenticator.get_authenticated_user(None, typed))
    except web.HTTPError as page:
        return f"{page.status_code} {page.get_message()}"
    if model is None:
        return "wrong"
    return "in as admin" if model["admin"] else "in"
