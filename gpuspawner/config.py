"""Add the services of gpuspawner to the configuration of an existing hub.

The last lines of an admin's ``jupyterhub_config.py``::

    c.JupyterHub.spawner_class = "gpu-docker"
    c.GPUDatabase.url = "sqlite:////srv/jupyterhub/gpuspawner.sqlite"
    import gpuspawner; gpuspawner.add_services(c)

The admin's earlier settings stay as they are. The services receive the settings in ``SECTIONS``
through their environment, because every user of the machine can read a command line. JupyterHub
stores that environment in its own database: to keep passwords out of it, use a PostgreSQL password
file (``PGPASSFILE``), and ``{file:/path}`` in the URL of a channel.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jupyterhub
import sqlalchemy as sa
from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue
from traitlets.log import get_logger
from traitlets.utils.nested_update import nested_update

from .core.errors import ConfigError
from .core.scopes import (
    ACCOUNTING_SCOPES,
    CULLER_SCOPES,
    CUSTOM_SCOPES,
    MEMBER_SCOPES,
    SERVER_SCOPES,
)
from .db.engine import default_url, sqlite_file
from .db.leader import identity_file
from .settings import CONFIG_VARIABLE
from .web import frame
from .web.frame import Frame, StaticGzip

CULLER = "idle-culler"

CULLER_CONFIG = Path(__file__).parent / "service" / "idle_culler_config.py"
"""The culler's configuration file; it makes the culler spare servers with busy GPUs."""

TEMPLATES = Path(__file__).parent / "spawners" / "hub_templates"
"""Templates of the pages that gpuspawner adds to the Hub."""

PAGES = (
    (r"/environments/?", "gpuspawner.hub_pages.handlers.Environments"),
    (r"/environments/-/live", "gpuspawner.hub_pages.handlers.LiveEnvironments"),
    (r"/environments/([^/]+)", "gpuspawner.hub_pages.handlers.EnvironmentPage"),
    (r"/environments/([^/]+)/logo", "gpuspawner.hub_pages.handlers.Logo"),
    (r"/catalog", "gpuspawner.hub_pages.catalog_images.CatalogState"),
    (r"/catalog/-/updates", "gpuspawner.hub_pages.catalog_images.ImageUpdatesState"),
    (r"/catalog/([^/]+)/update", "gpuspawner.hub_pages.catalog_images.ImageUpdatePage"),
    (r"/glossary", "gpuspawner.hub_pages.handlers.Glossary"),
    (r"/help", "gpuspawner.hub_pages.members_help.Help"),
    (r"/help/([a-z-]+)", "gpuspawner.hub_pages.members_help.Help"),
    (r"/notices", "gpuspawner.hub_pages.handlers.Notices"),
    (r"/welcome/?", "gpuspawner.hub_pages.handlers.Welcome"),
    (r"/welcome/first", "gpuspawner.hub_pages.handlers.FirstWelcome"),
    (r"/without-gpu/([^/]*)", "gpuspawner.hub_pages.handlers.StartWithoutGPU"),
    (r"/gpuspawner/static/(.*)", "gpuspawner.hub_pages.handlers.OwnFiles"),
    (r"/api/gpuspawner/updates", "gpuspawner.hub_pages.catalog_images.ImageUpdatesAPI"),
    (r"/api/gpuspawner/updates/([^/]+)", "gpuspawner.hub_pages.catalog_images.ImageUpdatesAPI"),
    (r"/api/gpuspawner/launcher", "gpuspawner.hub_pages.runs.LauncherAPI"),
    (r"/api/gpuspawner/launcher/quote", "gpuspawner.hub_pages.runs.QuoteAPI"),
    (r"/api/gpuspawner/launcher/sweep(/quote)?", "gpuspawner.hub_pages.runs.SweepLauncherAPI"),
    (r"/api/gpuspawner/launcher/environments", "gpuspawner.hub_pages.runs.EnvironmentsAPI"),
    (r"/api/gpuspawner/launcher/start", "gpuspawner.hub_pages.runs.StartRunsAPI"),
    (r"/api/gpuspawner/(.*)", "gpuspawner.hub_pages.handlers.ServiceRelay"),
)
"""Pages added to the Hub below ``/hub``; only the hub imports the handlers that they name."""

JUPYTERHUBS_SERVER_SCOPES = ("users:activity!user", "access:servers!server")
"""Scopes that JupyterHub gives to the token of every server."""

SECTIONS = (
    *("GPUDatabase", "GPUDevices", "GPUCredits", "GPURates", "GPUQueue", "GPUMembers", "GPUIdle"),
    *("GPUHealth", "GPUFolders", "GPUSlurm", "GPUMonitoring", "GPUSessions", "GPUNotifications"),
    *("GPUSharing", "GPUHost", "Accounting"),
)
"""Configuration sections that are passed to the service."""

RENAMED = {
    "Broker.database_url": "GPUDatabase.url",
    "Broker.hub_id_file": "GPUDatabase.hub_id_file",
    "Broker.device_source": "GPUDevices.source",
    "Broker.refresh_seconds": "GPUDevices.refresh_seconds",
    "Broker.opening_grant": "GPUCredits.opening_grant",
    "Broker.hold_minutes": "GPUCredits.hold_minutes",
    "Broker.hold_session": "GPUCredits.hold_session",
    "Broker.grace_seconds": "GPUCredits.grace_seconds",
    "Broker.when_dry": "GPUCredits.when_exhausted",
    "Broker.credits_help": "GPUCredits.help_text",
    "Accounting.warn_minutes": "GPUCredits.warn_minutes",
    "Accounting.credits_hook": "GPUNotifications.hook",
    "Accounting.charge_seconds": "GPUCredits.charge_seconds",
    "Broker.gpu_rates": "GPURates.by_model",
    "Broker.special_rates": "GPURates.special",
    "Broker.rate_zone": "GPURates.zone",
    "Broker.group_weights": "GPUQueue.group_weights",
    "Broker.group_priority": "GPUQueue.group_priority",
    "Broker.member_limits": "GPUQueue.member_limits",
    "Broker.group_limits": "GPUQueue.group_limits",
    "Broker.queue_policy": "GPUQueue.policy",
    "Broker.claim_minutes": "GPUQueue.claim_minutes",
    "Broker.membership_grace_minutes": "GPUMembers.grace_minutes",
    "Broker.when_idle": "GPUIdle.policy",
    "Broker.when_sick": "GPUHealth.actions",
    "Broker.sick_quiet_minutes": "GPUHealth.quiet_minutes",
    "Broker.sick_most": "GPUHealth.max_relapses",
    "Broker.sick_refund_minutes": "GPUHealth.refund_minutes",
    "Broker.sick_refund": "GPUHealth.refund",
    "Accounting.probe_image": "GPUHealth.probe_image",
    "Accounting.probe_injection": "GPUHealth.probe_injection",
    "Broker.folder_source": "GPUFolders.source",
    "Broker.folder_quota": "GPUFolders.quota",
    "Broker.most_folders": "GPUFolders.max_per_member",
    "Broker.xfs_quota": "GPUFolders.xfs_quota",
    "Broker.cluster": "GPUSlurm.cluster_file",
    "Broker.jobs_of_members": "GPUSlurm.jobs_of_members",
    "Accounting.cluster_seconds": "GPUSlurm.sync_seconds",
    "Accounting.session_warn_minutes": "GPUSessions.warn_minutes",
    "Accounting.session_hook": "GPUNotifications.hook",
    "Accounting.look_inside_seconds": "GPUMonitoring.containers_seconds",
    "Accounting.sample_seconds": "GPUMonitoring.sample_seconds",
    "Accounting.keep_minutes_days": "GPUMonitoring.keep_minutes_days",
    "Accounting.keep_hours_days": "GPUMonitoring.keep_hours_days",
    "Accounting.members_see_names": "GPUMonitoring.members_see_names",
    "Notifier.channels": "GPUNotifications.channels",
    "Notifier.default_channels": "GPUNotifications.default_channels",
    "Notifier.hook": "GPUNotifications.hook",
    "GPUCredits.hook": "GPUNotifications.hook",
    "GPUSessions.hook": "GPUNotifications.hook",
    "Notifier.retry_seconds": "GPUNotifications.retry_seconds",
}
"""Old names of settings and their current names."""

FIXED = {
    "GPUDatabase.hub_id_file": "the file is gpuspawner_hub_id beside the cookie secret",
    "GPUHealth.quiet_minutes": "it is always 10",
    "GPUHealth.max_relapses": "it is always 3",
    "GPUHealth.refund_minutes": "it is always 60",
    "GPUHealth.probe_image": "it is always the spawner's own image",
    "GPUHealth.probe_injection": "it is always the spawner's gpu_injection",
    "GPUFolders.max_per_member": "it is always 10",
    "GPUMonitoring.containers_seconds": "it is always 45",
    "GPUMonitoring.keep_minutes_days": "it is always 14",
    "GPUMonitoring.keep_hours_days": "it is always 400",
    "GPUNotifications.retry_seconds": "the pauses are always 10 s to 6 h",
    "GPUSlurm.sync_seconds": "it is always 60",
    "Accounting.engines": "it is always the engines of the leases",
    "GPUDockerSpawner.oom_score_adj": "it is 500 unless extra_host_config has another",
    "GPUDockerSpawner.folders_target": 'it is "shared" in the home of workspace_target',
    "CatalogPages.show_restricted": "it is always off",
    "MemberLDAPAuthenticator.group_name_attribute": "it is always cn",
    **dict.fromkeys(
        (
            *("Broker.ticket_days", "Accounting.credits_hook_seconds"),
            *("Accounting.session_hook_seconds", "Accounting.processes_seconds"),
            *("Notifier.hook_seconds", "Notifier.send_seconds"),
            *("Broker.slurm_rest", "Broker.slurm_rest_token", "Broker.slurm_rest_ca"),
        ),
        "it has no successor",
    ),
}
"""Settings that no longer exist, and what holds instead."""

PASSED_ON = (
    *("HOME", "TZ", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONFIG"),
    "GPUSPAWNER_SIMULATION",
)
"""Environment variables of the hub that the service needs, beside PostgreSQL's own (``PG...``)."""

SERVICE_TIMEOUT = 120
"""Seconds in which the service has to answer: a large migration takes more than JupyterHub's 30."""

CULLER_CANNOT_ASK = (
    "jupyterhub-idle-culler {} cannot ask if GPUs are busy: it stops servers by their activity"
)
INSTALL_CULLER = "Install version 2 or newer: pip install 'jupyterhub-idle-culler>=2'"


def add_services(
    c: Config,
    *,
    name: str = "gpu",
    url: str = "http://127.0.0.1:10190",
    cull_idle_after: int | None = None,
) -> None:
    """Add the accounting service, and the idle culler if ``cull_idle_after`` is given.

    Call this once, after the settings of ``SECTIONS`` and after ``c.JupyterHub.internal_ssl``.

    Args:
        c: The hub's configuration.
        name: The service's name on the hub; its pages are at ``/services/NAME/``.
        url: Where the service listens: a free port of this machine.
        cull_idle_after: Seconds without activity after which a server is stopped, unless its GPUs
            are busy.

    Raises:
        ConfigError: An argument or a setting is invalid.
    """
    if cull_idle_after is not None and cull_idle_after <= 0:
        raise ConfigError(what=f"cull_idle_after is {cull_idle_after}; it counts seconds")
    if c.JupyterHub.get("internal_ssl"):
        _require_loopback(url)
    require_new_names(c)
    _add_templates(c)
    _add_pages(c, name)
    _add_log_filter(c)
    _define_scopes(c)
    if "concurrent_spawn_limit" not in c.JupyterHub:
        # Queued servers count as pending spawns, which JupyterHub limits to 100 by default.
        c.JupyterHub.concurrent_spawn_limit = 0
    service: dict[str, Any] = {
        "name": name,
        "url": url,
        "command": [sys.executable, "-m", "gpuspawner.service"],
        "environment": _environment(c),
        "oauth_no_confirm": True,
    }
    if jupyterhub.version_info >= (6,):  # before, it was always ten seconds
        service["timeout"] = SERVICE_TIMEOUT
    _add_service(c, service, ACCOUNTING_SCOPES)
    _let_members_in(c, (f"access:services!service={name}", *MEMBER_SCOPES))
    _extend_role(c, "server", JUPYTERHUBS_SERVER_SCOPES, SERVER_SCOPES)
    if cull_idle_after is not None:
        _add_service(c, _culler(c, cull_idle_after), CULLER_SCOPES)


def require_new_names(c: Config) -> None:
    """Raise ConfigError naming settings with old names, which traitlets would silently ignore."""
    found = []
    for old in (*RENAMED, *FIXED):
        section, _, name = old.partition(".")
        if name not in c.get(section, {}):
            continue
        new = RENAMED.get(old, old)
        gone = f"c.{old} is no longer a setting, {FIXED.get(new)}: leave it out"
        found.append(gone if new in FIXED else f"c.{old} is c.{new} now")
    if found:
        raise ConfigError(what="; ".join(found))


def _require_loopback(url: str) -> None:
    """Raise ConfigError unless the service has a plain http address on the loopback interface.

    JupyterHub waits for an https service with a TLS context that is made for a server. That never
    succeeds, and JupyterHub exits.
    """
    parsed = urlsplit(url)
    if parsed.scheme == "http" and parsed.hostname in ("127.0.0.1", "::1", "localhost"):
        return
    what = (
        f"add_services has url={url!r}; with c.JupyterHub.internal_ssl it has to be "
        'http://127.0.0.1 and a port, such as "http://127.0.0.1:10190": the Hub and its proxy '
        "reach the service on this machine, and JupyterHub cannot wait for an https service"
    )
    raise ConfigError(what=what)


def _culler(c: Config, idle_after: int) -> dict[str, Any]:
    """Return the service entry of the idle culler, which spares servers with busy GPUs."""
    command = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={idle_after}"]
    if c.JupyterHub.get("internal_ssl"):
        certificates = os.path.abspath(c.JupyterHub.get("internal_certs_location", "internal-ssl"))
        command += ["--ssl-enabled=True", f"--internal-certs-location={certificates}"]
    if not c.get("GPUMonitoring", {}).get("sample_seconds", True):
        return {"name": CULLER, "command": command}
    if why := why_culler_cannot_ask():
        get_logger().warning("%s. %s.", why, INSTALL_CULLER)
        return {"name": CULLER, "command": command}
    for_database = ("HOME", "TZ", "GPUSPAWNER_DATABASE_URL")
    kept = {
        name: text
        for name, text in _environment(c).items()
        if name.startswith("PG") or name in for_database
    }
    command.append(f"--config={CULLER_CONFIG}")
    return {"name": CULLER, "command": command, "environment": kept}


def why_culler_cannot_ask() -> str:
    """Return why the installed culler cannot ask if GPUs are busy; empty if it can."""
    installed = version("jupyterhub-idle-culler")
    return CULLER_CANNOT_ASK.format(installed) if int(installed.split(".")[0]) < 2 else ""


def _add_service(c: Config, service: dict[str, Any], scopes: tuple[str, ...]) -> None:
    name = service["name"]
    if any(other.get("name") == name for other in _entries(c.JupyterHub.services)):
        what = f"there are two services named {name!r}; call add_services once, or pass a name="
        raise ConfigError(what=what)
    role = {"name": f"service-{name}", "scopes": list(scopes), "services": [name]}
    _append(c, "services", service)
    _append(c, "load_roles", role)


def _let_members_in(c: Config, scopes: tuple[str, ...]) -> None:
    """Let every member open the service, without changing their other permissions."""
    if _role(c, "user") is not None or "extra_user_scopes" not in c.JupyterHub:
        _extend_role(c, "user", ("self",), scopes)
        return
    extra = c.JupyterHub.extra_user_scopes  # JupyterHub ignores it if we define the role
    if isinstance(extra, LazyConfigValue):
        extra.update(scopes)
    else:
        c.JupyterHub.extra_user_scopes = {*extra, *scopes}


def _role(c: Config, name: str) -> dict[str, Any] | None:
    """Return the role of this name from the admin's configuration, or None."""
    roles = _entries(c.JupyterHub.load_roles)
    return next((role for role in roles if role.get("name") == name), None)


def _extend_role(c: Config, name: str, theirs: tuple[str, ...], ours: tuple[str, ...]) -> None:
    """Add the scopes ``ours`` to a built-in role of JupyterHub, which has ``theirs`` by default."""
    if (role := _role(c, name)) is None:
        _append(c, "load_roles", {"name": name, "scopes": [*theirs, *ours]})
        return
    scopes = list(role.get("scopes", theirs))
    role["scopes"] = [*scopes, *(scope for scope in ours if scope not in scopes)]


def _define_scopes(c: Config) -> None:
    """Define gpuspawner's scopes next to the admin's own, for roles and tokens."""
    value = c.JupyterHub.custom_scopes
    if isinstance(value, LazyConfigValue):
        value.update(copy.deepcopy(CUSTOM_SCOPES))
    else:
        c.JupyterHub.custom_scopes = {**value, **copy.deepcopy(CUSTOM_SCOPES)}


def _add_templates(c: Config) -> None:
    """Add gpuspawner's templates after the admin's own and before JupyterHub's."""
    value = c.JupyterHub.template_paths
    if isinstance(value, LazyConfigValue):
        value.insert(len(value.to_dict().get("inserts", ())), str(TEMPLATES))
    else:
        c.JupyterHub.template_paths = [*value, str(TEMPLATES)]


def _add_pages(c: Config, service: str) -> None:
    """Add gpuspawner's pages to the Hub, and the settings that they need."""
    for page in PAGES:
        _append(c, "extra_handlers", page)
    values = {"gpuspawner_service": service, "gpuspawner_dashboard": _dashboard_of}
    values["gpuspawner_own_logo"] = "logo_file" in c.JupyterHub
    # Local processes run nothing without a session.
    values["gpuspawner_has_runs"] = not _is_local(c)
    c.JupyterHub.template_vars.update(values)
    if "default_url" not in c.JupyterHub:
        c.JupyterHub.default_url = _front_door
    settings = c.JupyterHub.tornado_settings
    is_lazy = isinstance(settings, LazyConfigValue)
    theirs = settings.to_dict().get("update", {}) if is_lazy else settings
    if not {"transforms", "compress_response", "gzip"} & theirs.keys():
        settings.update({"transforms": [StaticGzip]})


def _add_log_filter(c: Config) -> None:
    """Keep tracebacks of ordinary refusals out of the Hub's log."""
    name = "gpuspawner_refusals"
    sections = [c.get(section, {}) for section in ("JupyterHub", "Application")]
    theirs: Any = next((s["logging_config"] for s in sections if "logging_config" in s), {})
    if isinstance(theirs, LazyConfigValue):
        theirs = theirs.get_value({})
    filters = {name: {"()": "gpuspawner.spawners.progress.RefusalFilter"}}
    loggers = {logger: {"filters": [name]} for logger in ("JupyterHub", "asyncio")}
    c.JupyterHub.logging_config = nested_update(
        {"filters": filters, "loggers": loggers}, copy.deepcopy(theirs)
    )


# Importing the Hub's handlers takes half a second, and each command reads this configuration: only
# the hub imports them, at its start.


def _dashboard_of(user: Any) -> Any:
    """Return what home.html calls for this user."""
    from .hub_pages.handlers import dashboard_of

    return dashboard_of(user)


def _front_door(handler: Any) -> str:
    """Return the default URL for a user: newcomers get the welcome page."""
    from .hub_pages.handlers import front_door

    return front_door(handler)


def _entries(value: Any) -> list[dict[str, Any]]:
    """Return the entries of a list setting, even if it only holds lazy additions."""
    if isinstance(value, LazyConfigValue):
        parts = [entry for part in value.to_dict().values() for entry in part]
        return [entry[1] if isinstance(entry, tuple) else entry for entry in parts]  # by insert()
    return list(value)


def _append(c: Config, setting: str, entry: Any) -> None:
    value = c.JupyterHub[setting]
    if isinstance(value, (list, LazyConfigValue)):
        value.append(entry)
    else:
        c.JupyterHub[setting] = [*value, entry]


# The environment of the service.


def _environment(c: Config) -> dict[str, str]:
    settings = {section: _plain_section(c, section) for section in SECTIONS}
    if catalog := _catalog_to_pull(c):
        settings["Accounting"].setdefault("catalog", catalog)
    settings["GPUDockerSpawner"] = _probe_settings(c)
    database = settings["GPUDatabase"].pop("url", None) or default_url()
    # URLs of channels can take secrets from environment variables.
    named = set(re.findall(r"\{env:([^{}\s]+)\}", json.dumps(settings["GPUNotifications"])))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith("PG") or name in named
    }
    if host := _engine_url(c):
        kept["DOCKER_HOST"] = host
    return kept | {
        "GPUSPAWNER_DATABASE_URL": _absolute(database),
        CONFIG_VARIABLE: json.dumps({name: told for name, told in settings.items() if told}),
        "GPUSPAWNER_HUB_PID": str(os.getpid()),
        "GPUSPAWNER_HUB_ID_FILE": str(identity_file(c)),
        frame.VARIABLE: _frame(c).to_text(),
    }


def _frame(c: Config) -> Frame:
    """Return the settings of the Hub's pages, in whose frame the service's pages are."""
    paths, values = c.JupyterHub.template_paths, c.JupyterHub.template_vars
    if isinstance(paths, LazyConfigValue):
        paths = paths.get_value([])
    if isinstance(values, LazyConfigValue):
        values = values.get_value({})
    return frame.passed_on([os.path.abspath(path) for path in paths], values)


def _catalog_to_pull(c: Config) -> str:
    """Return the catalog's path if a Docker spawner pulls its images, or an empty string."""
    found = _spawner_settings(c)
    pulls = str(found.get("pull_policy", "")).lower() not in ("never", "skip")
    path = found.get("catalog")
    if not isinstance(path, (str, os.PathLike)) or not path or _is_local(c) or not pulls:
        return ""
    return str(os.path.abspath(path))


def _is_local(c: Config) -> bool:
    """Return True if servers are local processes, judging by the spawner's name."""
    return "local" in str(c.JupyterHub.get("spawner_class", "")).lower()


def _spawner_settings(c: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section in ("DockerSpawner", "GPUSpawnerMixin", "GPUDockerSpawner", "GPUSlurmSpawner"):
        found |= c.get(section, {})
    return found


def _probe_settings(c: Config) -> dict[str, str]:
    """Return the spawner's settings with which a sick GPU is probed as servers get theirs."""
    if _is_local(c):
        return {"gpu_injection": "process"}
    found = _spawner_settings(c)
    settings = {name: found.get(name) for name in ("image", "gpu_injection")}
    return {name: text for name, text in settings.items() if isinstance(text, str) and text}


def _engine_url(c: Config) -> str:
    """Return the Docker Engine's URL from the spawner's ``client_kwargs``, or an empty string."""
    for section in ("GPUDockerSpawner", "DockerSpawner"):
        settings = c[section].get("client_kwargs") if section in c else None
        if isinstance(settings, dict) and settings.get("base_url"):
            return str(settings["base_url"])
    return ""


def _plain_section(c: Config, section: str) -> dict[str, Any]:
    """Return a section's settings as JSON can represent them. Raises ConfigError."""
    if section not in c:
        return {}
    plain = {}
    for setting, value in c[section].items():
        if isinstance(value, LazyConfigValue):
            value = _resolved(section, setting, value)
        try:
            plain[setting] = json.loads(json.dumps(value, default=_plain_value))
        except TypeError:
            what = (
                f"c.{section}.{setting} is {value!r}, which cannot be handed to the accounting "
                "service; use numbers, text, lists and dictionaries"
            )
            raise ConfigError(what=what) from None
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError


def _resolved(section: str, setting: str, value: LazyConfigValue) -> Any:
    """Return the default value with additions such as ``c.GPURates.by_model.update(...)``."""
    from .settings import CLASSES

    classes = {each.__name__: each for each in CLASSES}
    known = classes[section].class_traits(config=True) if section in classes else {}
    if setting not in known:
        what = f"c.{section}.{setting} can only be set as a whole: c.{section}.{setting} = ..."
        raise ConfigError(what=what)
    # Resolve a copy: later lines of the configuration may add to the value.
    return copy.deepcopy(value).get_value(known[setting].default())


def _absolute(database: str) -> str:
    """Return the database URL with a path that does not depend on the working directory."""
    if (file := sqlite_file(database)) is None:
        return database  # the hub and the service report what is wrong with it
    url = sa.make_url(database).set(database=str(file))
    return url.render_as_string(hide_password=False)
