"""What add_services makes of a configuration. Real: traitlets configuration objects, as an admin's
jupyterhub_config.py fills them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jupyterhub_idle_culler
import pytest
from jupyterhub.app import JupyterHub
from jupyterhub.roles import get_default_roles
from jupyterhub.services.service import Service
from tornado.util import import_object
from tornado.web import RequestHandler
from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue

import gpuspawner
from gpuspawner.cli.check_hub import check_services
from gpuspawner.cli.hub import open_hub
from gpuspawner.config import (
    CULLER_CONFIG,
    FIXED,
    PAGES,
    RENAMED,
    SECTIONS,
    TEMPLATES,
    add_services,
)
from gpuspawner.core.errors import ConfigError
from gpuspawner.core.scopes import (
    ACCOUNTING_SCOPES,
    CULLER_SCOPES,
    CUSTOM_SCOPES,
    GRANT,
    READ_ACCOUNTS,
    ScopeFilter,
    reach,
)
from gpuspawner.engines.preflight import Status
from gpuspawner.service.app import Accounting

CULLER_ASKS = hasattr(jupyterhub_idle_culler, "IdleCuller")
"""It has a hook that decides if a server is stopped, and options for it."""
USER_SCOPE = "access:services!service=gpu"
USER_SCOPES = [USER_SCOPE, "custom:gpuspawner:session!user"]


def value_of(c: Config, setting: str, start: Any = None) -> Any:
    """What JupyterHub will see of a setting, which is a list unless ``start`` is another."""
    value = c.JupyterHub[setting]
    if not isinstance(value, LazyConfigValue):
        return value
    return value.get_value([] if start is None else start)


def service_of(c: Config, name: str = "gpu") -> dict[str, Any]:
    (found,) = [s for s in value_of(c, "services") if s["name"] == name]
    return dict(found)


def role_of(c: Config, name: str) -> dict[str, Any]:
    (found,) = [r for r in value_of(c, "load_roles") if r["name"] == name]
    return dict(found)


def told(c: Config) -> dict[str, Any]:
    """The settings that reach the service."""
    return dict(json.loads(service_of(c)["environment"]["GPUSPAWNER_CONFIG"]))


def served(settings: dict[str, Any] | None = None, **words: Any) -> Config:
    """A configuration of these settings to which ours were added."""
    c = Config(settings or {})
    add_services(c, **words)
    return c


def database_url(c: Config) -> str:
    return str(service_of(c)["environment"]["GPUSPAWNER_DATABASE_URL"])


def test_empty_config_gets_service_roles_and_scopes() -> None:
    c = Config()
    gpuspawner.add_services(c)

    (service,) = value_of(c, "services")
    assert service["command"] == [sys.executable, "-m", "gpuspawner.service"]
    assert service["url"] == "http://127.0.0.1:10190"
    assert service["oauth_no_confirm"] is True
    if "timeout" in Service.class_trait_names():
        assert service["timeout"] == 120, "JupyterHub ends after 30 s, too few for a busy machine"
    assert service.keys() <= set(Service.class_trait_names(input=True)), "or it does not start"
    role = role_of(c, "service-gpu")
    assert (role["services"], role["scopes"]) == (["gpu"], list(ACCOUNTING_SCOPES))
    assert set(ACCOUNTING_SCOPES) == {"list:users", "read:groups", "servers"}
    assert role_of(c, "user")["scopes"] == ["self", *USER_SCOPES]
    assert value_of(c, "custom_scopes", {}) == CUSTOM_SCOPES


def add(c: Config, setting: str, entry: Any, how: str) -> None:
    """Write an entry of the admin's in one of the ways that traitlets knows."""
    match how:
        case "list":
            c.JupyterHub[setting] = [entry]
        case "tuple":
            c.JupyterHub[setting] = (entry,)
        case "insert":
            c.JupyterHub[setting].insert(0, entry)
        case "append":
            c.JupyterHub[setting].append(entry)
        case _:
            getattr(c.JupyterHub[setting], how)([entry])


@pytest.mark.parametrize("how", ["list", "append", "extend", "insert", "prepend", "tuple"])
def test_admin_services_and_roles_are_kept(how: str) -> None:
    c = Config()
    add(c, "services", {"name": "theirs", "url": "http://127.0.0.1:1"}, how)
    role = {"name": "theirs", "scopes": ["list:users"], "services": ["theirs"]}
    add(c, "load_roles", role, how)
    add_services(c)
    c.JupyterHub.services.append({"name": "later"})

    assert {s["name"] for s in value_of(c, "services")} == {"theirs", "gpu", "later"}
    names = {r["name"] for r in value_of(c, "load_roles")}
    assert names == {"theirs", "service-gpu", "user", "server"}
    assert role_of(c, "theirs")["scopes"] == ["list:users"]


SERVER = next(role["scopes"] for role in get_default_roles() if role["name"] == "server")
OUR_SERVER = "custom:gpuspawner:session!server"


@pytest.mark.parametrize("how", ["list", "append"])
@pytest.mark.parametrize(
    ("name", "theirs", "scopes"),
    [
        ("user", ["self", "access:services"], ["self", "access:services", *USER_SCOPES]),
        ("user", None, ["self", *USER_SCOPES]),
        ("server", ["list:groups"], ["list:groups", OUR_SERVER]),
        ("server", None, [*SERVER, OUR_SERVER]),
    ],
)
def test_admin_roles_are_extended_and_default_scopes_kept(
    name: str, theirs: list[str] | None, scopes: list[str], how: str
) -> None:
    c = Config()
    role = {"name": name, "description": "Us"} | ({"scopes": theirs} if theirs else {})
    add(c, "load_roles", role, how)
    add_services(c)
    assert role_of(c, name)["scopes"] == scopes
    assert role_of(c, name)["description"] == "Us"
    assert role_of(served(), "server")["scopes"] == [*SERVER, OUR_SERVER]


@pytest.mark.parametrize("lazy", [True, False])
def test_extra_user_scopes_and_custom_scopes_are_kept(lazy: bool) -> None:
    """JupyterHub ignores the extra ones as soon as there is a role named user."""
    c = Config()
    theirs = {"custom:lab:door": {"description": "Open the door"}}
    if lazy:
        c.JupyterHub.extra_user_scopes.update({"shares!user"})
        c.JupyterHub.custom_scopes.update(theirs)
    else:
        c.JupyterHub.extra_user_scopes = {"shares!user"}
        c.JupyterHub.custom_scopes = theirs
    add_services(c)

    assert value_of(c, "extra_user_scopes", set()) == {"shares!user", *USER_SCOPES}
    assert "user" not in {r["name"] for r in value_of(c, "load_roles")}
    assert value_of(c, "custom_scopes", {}) == {**theirs, **CUSTOM_SCOPES}


def test_idle_culler_is_added_on_request(caplog: pytest.LogCaptureFixture) -> None:
    c = served(cull_idle_after=3600)
    culler = service_of(c, "idle-culler")
    classic = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]
    if CULLER_ASKS:
        assert culler["command"] == [*classic, f"--config={CULLER_CONFIG}"]
        assert CULLER_CONFIG.is_file()
        assert culler["environment"]["GPUSPAWNER_DATABASE_URL"] == database_url(c)
        assert "GPUSPAWNER_CONFIG" not in culler["environment"]  # the secrets of channels
        assert not caplog.messages
    else:
        assert culler == {"name": "idle-culler", "command": classic}
        assert "Install version 2 or newer" in caplog.text
    role = role_of(c, "service-idle-culler")
    assert (role["scopes"], role["services"]) == (list(CULLER_SCOPES), ["idle-culler"])

    c = served({"GPUMonitoring": {"sample_seconds": 0}}, cull_idle_after=3600)
    assert service_of(c, "idle-culler")["command"] == classic

    ssl = {"internal_ssl": True, "internal_certs_location": "/srv/certificates"}
    c = served({"JupyterHub": ssl}, cull_idle_after=3600)
    command = service_of(c, "idle-culler")["command"]
    certificates = "--internal-certs-location=/srv/certificates"
    assert command[3:6] == ["--timeout=3600", "--ssl-enabled=True", certificates]


def test_check_says_what_to_do_about_a_culler_that_cannot_ask() -> None:
    c = served({"JupyterHub": {"spawner_class": "gpu-local"}}, cull_idle_after=3600)
    found = {finding.name: finding for finding in check_services(open_hub(c))}
    assert {f.status for f in found.values()} == {Status.OK}
    culler = found["idle culler"]
    assert ("cannot ask if GPUs are busy" in culler.text) is not CULLER_ASKS
    assert ("Install version 2 or newer" in culler.remedy) is not CULLER_ASKS


def test_invalid_config_raises_a_clear_error() -> None:
    for url in ("https://127.0.0.1:10190", "http://10.0.0.5:10190", "127.0.0.1"):
        served(url=url)  # whatever it is without internal_ssl
        with pytest.raises(ConfigError, match="internal_ssl"):
            served({"JupyterHub": {"internal_ssl": True}}, url=url)
    with pytest.raises(ConfigError, match="cull_idle_after is 0"):
        served(cull_idle_after=0)
    c = served()
    with pytest.raises(ConfigError, match="two services named 'gpu'"):
        add_services(c)
    add_services(c, name="gpu2", url="http://127.0.0.1:10191")
    assert {USER_SCOPE, "access:services!service=gpu2"} <= {*role_of(c, "user")["scopes"]}
    with pytest.raises(ConfigError, match=r"c\.GPUCredits\.help_text"):
        served({"GPUCredits": {"help_text": lambda: "ask me"}})
    c = Config()
    c.GPUSessions.warn_minutes.append(5)
    with pytest.raises(ConfigError, match=r"c\.GPUSessions\.warn_minutes = "):
        add_services(c)


@pytest.mark.parametrize("how", ["nothing", "list", "insert"])
def test_templates_rank_between_admin_and_jupyterhub(how: str) -> None:
    c = Config()
    if how != "nothing":
        add(c, "template_paths", "/mine", how)
    add_services(c)
    paths = JupyterHub(config=c).template_paths
    ours = paths.index(str(TEMPLATES))
    assert how == "nothing" or paths.index("/mine") < ours
    base = [path for path in paths if path.endswith("jupyterhub/templates")]
    assert all(ours < paths.index(path) for path in base)


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([], ScopeFilter()),
        ([READ_ACCOUNTS, "self"], ScopeFilter()),
        ([GRANT], ScopeFilter(everybody=True)),
        ([f"{GRANT}!group=ml", GRANT], ScopeFilter(everybody=True)),
        ([f"{GRANT}!group=ml", f"{GRANT}!group=a=b"], ScopeFilter(groups=frozenset({"ml", "a=b"}))),
        ([f"{GRANT}!user=ada", f"{READ_ACCOUNTS}!user=bob"], ScopeFilter(users=frozenset({"ada"}))),
        (
            [f"{GRANT}!user", f"{GRANT}!group=", f"{GRANT}!server=ada/x", f"{GRANT}ed"],
            ScopeFilter(),
        ),
    ],
)
def test_scope_reach_follows_its_group_and_user_filters(
    held: list[str], found: ScopeFilter
) -> None:
    assert reach(held, GRANT) == found
    assert bool(found) is bool(found.everybody or found.accounts())


@pytest.mark.parametrize("how", ["none", "set", "update", "theirs"])
def test_hub_pages_are_added_beside_admin_settings(how: str) -> None:
    c = Config()
    if how in ("set", "theirs"):
        c.JupyterHub.extra_handlers = [(r"/mine", object)]
        c.JupyterHub.template_vars = {"colour": "green"}
        c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
    if how == "theirs":
        c.JupyterHub.tornado_settings["compress_response"] = True
        c.JupyterHub.logo_file = "/etc/gpuspawner/logo.svg"
        c.JupyterHub.spawner_class = "gpu-local"
    if how == "update":
        c.JupyterHub.tornado_settings.update({"slow_spawn_timeout": 1})
    add_services(c, name="gpus")
    routes = [route for route, _ in value_of(c, "extra_handlers")]
    assert routes[-len(PAGES) :] == [route for route, _ in PAGES]
    assert (r"/mine" in routes) == (how in ("set", "theirs"))

    values = value_of(c, "template_vars", {})
    assert values["gpuspawner_service"] == "gpus"
    assert values["gpuspawner_own_logo"] == (how == "theirs")
    assert values["gpuspawner_has_runs"] == (how != "theirs")
    tornado = value_of(c, "tornado_settings", {})
    assert ("transforms" in tornado) == (how != "theirs")
    assert ("slow_spawn_timeout" in tornado) == (how != "none")
    assert all(issubclass(import_object(name), RequestHandler) for _, name in PAGES)


@pytest.mark.parametrize("how", ["none", "JupyterHub", "Application", "update"])
def test_log_filter_is_added_beside_the_admins_logging(how: str) -> None:
    c = Config()
    theirs = {"loggers": {"JupyterHub": {"level": "INFO"}, "mine": {"level": "DEBUG"}}}
    if how == "update":
        c.JupyterHub.logging_config.update(theirs)
    elif how != "none":
        c[how].logging_config = theirs
    add_services(c)
    found = c.JupyterHub.logging_config
    for name in ("JupyterHub", "asyncio"):
        assert found["loggers"][name]["filters"] == ["gpuspawner_refusals"]
    assert ("mine" in found["loggers"]) == (how != "none")
    assert ("level" in found["loggers"]["JupyterHub"]) == (how != "none")
    assert import_object(found["filters"]["gpuspawner_refusals"]["()"])


# What the service hears.


def test_database_url_reaches_the_service_by_environment_only() -> None:
    url = "postgresql://gpu:s3cret@db.example/gpu"
    c = served({"GPUDatabase": {"url": url}, "GPUCredits": {"grace_seconds": 7}})
    assert database_url(c) == c.GPUDatabase.url == url
    assert "s3cret" not in " ".join(service_of(c)["command"])
    assert told(c) == {"GPUCredits": {"grace_seconds": 7}}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sqlite:///gpu.sqlite", "sqlite:///{here}/gpu.sqlite"),
        ("sqlite:///sub/gpu.sqlite?timeout=5", "sqlite:///{here}/sub/gpu.sqlite?timeout=5"),
        ("sqlite:////srv/gpu.sqlite", "sqlite:////srv/gpu.sqlite"),
        ("no url at all", "no url at all"),
        (None, "sqlite:///{here}/gpuspawner.sqlite"),
    ],
)
def test_relative_sqlite_path_resolves_in_the_hub_folder(
    given: str | None, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUSPAWNER_DATABASE_URL", raising=False)
    c = served({"GPUDatabase": {"url": given}} if given else {})
    assert database_url(c) == meant.format(here=tmp_path)
    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", "postgresql:///gpu")
    assert database_url(served()) == "postgresql:///gpu"


@pytest.mark.parametrize(
    "settings, told_of",
    [
        ({"GPUSpawnerMixin": {"catalog": "catalog.yaml"}}, "{here}/catalog.yaml"),
        ({"GPUDockerSpawner": {"catalog": "/etc/c.yaml", "pull_policy": "always"}}, "/etc/c.yaml"),
        ({"Accounting": {"catalog": ""}, "GPUDockerSpawner": {"catalog": "/etc/c.yaml"}}, ""),
        ({"GPUDockerSpawner": {"catalog": "/c.yaml", "pull_policy": "Never"}}, None),
        (
            {"DockerSpawner": {"pull_policy": "skip"}, "GPUSpawnerMixin": {"catalog": "c.yaml"}},
            None,
        ),
        ({"JupyterHub": {"spawner_class": "gpu-local"}, "GPUSpawnerMixin": {"catalog": "c"}}, None),
        ({}, None),
    ],
)
def test_service_gets_the_catalog_whose_images_it_prepulls(
    settings: dict[str, Any], told_of: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = told_of and told_of.format(here=tmp_path)
    assert told(served(settings)).get("Accounting", {}).get("catalog") == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"DockerSpawner": {"image": "lab:1"}, "GPUDockerSpawner": {"gpu_injection": "cdi"}},
            ("lab:1", "cdi"),
        ),
        ({"JupyterHub": {"spawner_class": "gpu-local"}}, (None, "process")),
        ({}, (None, None)),
    ],
)
def test_service_gets_probe_image_and_gpu_injection(
    settings: dict[str, Any], expected: tuple[str | None, str | None]
) -> None:
    found = told(served(settings)).get("GPUDockerSpawner", {})
    assert (found.get("image"), found.get("gpu_injection")) == expected


def test_settings_of_every_plain_type_reach_the_service() -> None:
    c = Config()
    c.GPURates.by_model.update({"A100": 4})
    c.GPUCredits.opening_grant = "12.5"
    c.GPUDevices.source = Path("nvml")
    c.GPUCredits.charge_seconds = 5
    c.GPUSessions.warn_minutes = {5, 20}
    c.GPUNotifications.channels = {"mail": "mailto://mail.example?to={address}"}
    add_services(c)

    assert told(c) == {
        "GPURates": {"by_model": {"*": 1, "A100": 4}},
        "GPUCredits": {"opening_grant": "12.5", "charge_seconds": 5},
        "GPUDevices": {"source": "nvml"},
        "GPUSessions": {"warn_minutes": [5, 20]},
        "GPUNotifications": {"channels": {"mail": "mailto://mail.example?to={address}"}},
    }
    c.GPURates.by_model.update({"T4": 2})
    assert c.GPURates.by_model.get_value({"*": 1}) == {"*": 1, "A100": 4, "T4": 2}


def test_service_gets_only_the_environment_variables_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = {
        "CHAT_TOKEN": "the token",
        "MAIL_PASSWORD": "the password",
        "DOCKER_HOST": "tcp://127.0.0.1:2376",
        "DOCKER_TLS_VERIFY": "1",
        "DOCKER_CERT_PATH": "/etc/docker/client",
        "PGPASSFILE": "/etc/gpu.pgpass",
    }
    for name, value in {**passed, "OTHER_SECRET": "x", "CONFIGPROXY_AUTH_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    channels = {
        "chat": {"url": "mmosts://chat.example/{env:CHAT_TOKEN}?channels={address}"},
        "mail": "mailtos://me:{env:MAIL_PASSWORD}@mail.example?to={address}",
        "gone": "json://chat.example/{env:NOT_THERE}",
    }
    secret = {"cookie_secret_file": "/srv/hub/secret"}
    c = served({"GPUNotifications": {"channels": channels}, "JupyterHub": secret})
    environment = service_of(c)["environment"]
    assert environment["GPUSPAWNER_HUB_ID_FILE"] == "/srv/hub/gpuspawner_hub_id"
    assert passed.items() <= environment.items()
    assert environment["GPUSPAWNER_HUB_PID"] == str(os.getpid())
    assert not {"OTHER_SECRET", "NOT_THERE", "CONFIGPROXY_AUTH_TOKEN"} & set(environment)
    assert all(isinstance(value, str) for value in environment.values())


def test_service_gets_every_config_section_it_reads() -> None:
    assert {*SECTIONS} == {each.__name__ for each in Accounting.classes} | {Accounting.__name__}


def test_renamed_or_removed_setting_is_rejected() -> None:
    """traitlets says nothing of a section that no class reads."""
    known = {each.__name__: each for each in Accounting.classes}
    for old in (*RENAMED, *FIXED):
        section, _, name = old.partition(".")
        new = RENAMED.get(old, old)
        now, _, trait = new.partition(".")
        exists = now in known and trait in known[now].class_trait_names(config=True)
        assert exists is (new not in FIXED), old
        expected = f"c.{new} now" if exists else f"no longer a setting, {FIXED[new]}: leave it out"
        with pytest.raises(ConfigError, match=re.escape(f"c.{old} is {expected}")):
            add_services(Config({section: {name: 1}}))
