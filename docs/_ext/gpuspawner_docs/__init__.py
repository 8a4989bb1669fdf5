"""The reference of gpuspawner, generated when the site is built from the code that it describes."""

from __future__ import annotations

from typing import Any

from sphinx.util import logging

from . import (
    changes,
    commands,
    environment,
    examples,
    links,
    notices,
    operations,
    requests,
    rest,
    schemas,
    settings,
)
from .page import KINDS

logger = logging.getLogger(__name__)

DIRECTIVES = {
    "add-services": requests.AddServices,
    "alerts": operations.Alerts,
    "catalog-keys": schemas.CatalogKeys,
    "changed-defaults": settings.ChangedDefaults,
    "cluster-keys": schemas.ClusterKeys,
    "charge-example": examples.ChargeExample,
    "command-table": commands.CommandTable,
    "commands": commands.Commands,
    "common-options": commands.CommonOptions,
    "environment-variables": environment.EnvironmentVariables,
    "events": notices.Events,
    "fields": examples.Fields,
    "health-causes": operations.Causes,
    "idle-example": examples.IdleExample,
    "metrics": operations.Metrics,
    "notices": notices.Notices,
    "queue-example": examples.QueueExample,
    "request-fields": requests.RequestFields,
    "roles": operations.Roles,
    "route-errors": rest.RouteErrors,
    "route-table": rest.RouteTable,
    "routes": rest.Routes,
    "scopes": operations.Scopes,
    "settings": settings.Settings,
    "settings-table": settings.SettingsTable,
    "unreleased": changes.Unreleased,
}


def _check(app: Any, env: Any) -> None:
    """Warn of what the code has and no page shows."""
    shown = env.domains.standard_domain.objects
    for kind, names in (("setting", settings.names()), ("route", rest.names())):
        for name in names:
            if (kind, name) not in shown:
                logger.warning("no page of the reference shows the %s %s", kind, name)
    for problem in environment.problems():
        logger.warning("environment variables: %s", problem)


def setup(app: Any) -> dict[str, Any]:
    """Add the directives, the roles that refer to entries, and the checks."""
    for kind in KINDS:
        app.add_object_type(kind, kind, objname=kind)
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    app.add_post_transform(links.LinkNames)
    # After Sphinx, which makes the contents of the page when it is read.
    app.connect("doctree-read", settings.shorten_contents, priority=900)
    app.connect("env-check-consistency", _check)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
