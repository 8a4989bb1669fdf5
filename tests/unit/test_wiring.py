"""Real here: traitlets configuration objects, as an admin's jupyterhub_config.py fills them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from jupyterhub.roles import get_default_roles
from tornado.util import import_object
from tornado.web import RequestHandler
from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue

import gpuspawner
from gpuspawner.config import CULLER_CONFIG, PAGES, TEMPLATES, add_services
from gpuspawner.core.errors import ConfigError
from gpuspawner.core.scopes import (
    ACCOUNTING_SCOPES,
    CULLER_SCOPES,
    CUSTOM_SCOPES,
    GRANT,
    READ_ACCOUNTS,
    Reach,
    reach,
)

USER_SCOPE = "access:services!service=gpu"
USER_SCOPES = [USER_SCOPE, "custom:gpuspawner:session!user"]


def value_of(c: Config, setting: str) -> Any:
    """What JupyterHub will see of a list setting."""
    value = c.JupyterHub[setting]
    return value.get_value([]) if isinstance(value, LazyConfigValue) else value


def service_of(c: Config, name: str = "gpu") -> dict[str, Any]:
    (found,) = [s for s in value_of(c, "services") if s["name"] == name]
    return dict(found)


def role_of(c: Config, name: str) -> dict[str, Any]:
    (found,) = [r for r in value_of(c, "load_roles") if r["name"] == name]
    return dict(found)


def told(c: Config) -> dict[str, Any]:
    """The settings that reach the service, but for where the hub's id is: it always does."""
    found = dict(json.loads(service_of(c)["environment"]["GPUSPAWNER_CONFIG"]))
    assert found.pop("GPUDatabase") == {"hub_id_file": c.GPUDatabase.hub_id_file}
    return found


def test_an_empty_configuration_gets_service_role_and_access() -> None:
    c = Config()
    gpuspawner.add_services(c)

    service = service_of(c)
    assert service["command"] == [sys.executable, "-m", "gpuspawner.service"]
    assert service["url"] == "http://127.0.0.1:10190"
    assert service["oauth_no_confirm"] is True
    assert service["timeout"] == 120, "JupyterHub ends after 30 s, too few for a busy machine"
    role = role_of(c, "service-gpu")
    assert role["services"] == ["gpu"]
    assert role["scopes"] == list(ACCOUNTING_SCOPES)
    assert set(ACCOUNTING_SCOPES) == {"list:users", "read:groups", "servers"}
    assert role_of(c, "user")["scopes"] == ["self", *USER_SCOPES]
    assert len(value_of(c, "services")) == 1


@pytest.mark.parametrize("how", ["list", "append", "extend", "insert", "prepend", "tuple"])
def test_services_and_roles_of_the_admin_stay(how: str) -> None:
    c = Config()
    for setting, entry in (
        ("services", {"name": "theirs", "url": "http://127.0.0.1:1"}),
        ("load_roles", {"name": "theirs", "scopes": ["list:users"], "services": ["theirs"]}),
    ):
        match how:
            case "list":
                c.JupyterHub[setting] = [entry]
            case "tuple":
                c.JupyterHub[setting] = (entry,)
            case "append":
                c.JupyterHub[setting].append(entry)
            case "extend":
                c.JupyterHub[setting].extend([entry])
            case "prepend":
                c.JupyterHub[setting].prepend([entry])
            case _:
                c.JupyterHub[setting].insert(0, entry)
    add_services(c)
    c.JupyterHub.services.append({"name": "later"})

    assert {s["name"] for s in value_of(c, "services")} == {"theirs", "gpu", "later"}
    assert {r["name"] for r in value_of(c, "load_roles")} == {
        *("theirs", "service-gpu", "user", "server")
    }
    assert role_of(c, "theirs")["scopes"] == ["list:users"]


@pytest.mark.parametrize("how", ["none", "set", "update"])
def test_our_scopes_stand_beside_the_admins(how: str) -> None:
    c = Config()
    theirs = {"custom:lab:door": {"description": "Open the door"}}
    if how == "set":
        c.JupyterHub.custom_scopes = theirs
    elif how == "update":
        c.JupyterHub.custom_scopes.update(theirs)
    add_services(c)
    value = c.JupyterHub.custom_scopes
    found = value.get_value({}) if isinstance(value, LazyConfigValue) else value
    assert found == (CUSTOM_SCOPES if how == "none" else {**theirs, **CUSTOM_SCOPES})


@pytest.mark.parametrize("lazy", [True, False])
def test_a_user_role_of_the_admin_is_extended(lazy: bool) -> None:
    c = Config()
    theirs = {"name": "user", "description": "Us", "scopes": ["self", "access:services"]}
    if lazy:
        c.JupyterHub.load_roles.append(theirs)
    else:
        c.JupyterHub.load_roles = [theirs]
    add_services(c)

    role = role_of(c, "user")
    assert role["scopes"] == ["self", "access:services", *USER_SCOPES]
    assert role["description"] == "Us"


def test_a_user_role_without_scopes_keeps_jupyterhubs_own() -> None:
    c = Config()
    c.JupyterHub.load_roles = [{"name": "user", "description": "Us"}]
    add_services(c)
    assert role_of(c, "user")["scopes"] == ["self", *USER_SCOPES]


@pytest.mark.parametrize("lazy", [True, False])
def test_extra_user_scopes_go_on_counting(lazy: bool) -> None:
    """JupyterHub ignores them as soon as there is a role named user."""
    c = Config()
    if lazy:
        c.JupyterHub.extra_user_scopes.update({"shares!user"})
    else:
        c.JupyterHub.extra_user_scopes = {"shares!user"}
    add_services(c)

    extra = c.JupyterHub.extra_user_scopes
    extra = extra.get_value(set()) if lazy else extra
    assert extra == {"shares!user", *USER_SCOPES}
    assert "user" not in {r["name"] for r in value_of(c, "load_roles")}


@pytest.mark.parametrize("lazy", [True, False])
def test_a_server_may_ask_about_itself_beside_what_it_may_already(lazy: bool) -> None:
    ours = "custom:gpuspawner:session!server"
    c = Config()
    add_services(c)
    default = next(role for role in get_default_roles() if role["name"] == "server")
    assert role_of(c, "server")["scopes"] == [*default["scopes"], ours]

    c = Config()
    theirs = {"name": "server", "scopes": ["users:activity!user", "list:groups"]}
    if lazy:
        c.JupyterHub.load_roles.append(theirs)
    else:
        c.JupyterHub.load_roles = [theirs]
    add_services(c)
    assert role_of(c, "server")["scopes"] == ["users:activity!user", "list:groups", ours]


def test_the_idle_culler_comes_when_asked() -> None:
    c = Config()
    add_services(c, cull_idle_after=3600)
    culler = service_of(c, "idle-culler")
    classic = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]
    assert culler["command"] == [*classic, f"--config={CULLER_CONFIG}"]
    assert CULLER_CONFIG.is_file()
    ours = service_of(c, "gpu")["environment"]
    assert culler["environment"]["GPUSPAWNER_DATABASE_URL"] == ours["GPUSPAWNER_DATABASE_URL"]
    assert "GPUSPAWNER_CONFIG" not in culler["environment"]  # the secrets of channels
    role = role_of(c, "service-idle-culler")
    assert role["scopes"] == list(CULLER_SCOPES)
    assert role["services"] == ["idle-culler"]
    c = Config()
    c.GPUMonitoring.sample_seconds = 0
    add_services(c, cull_idle_after=3600)
    assert service_of(c, "idle-culler")["command"] == classic


def test_the_idle_culler_gets_the_certificates_of_internal_ssl() -> None:
    c = Config()
    c.JupyterHub.internal_ssl = True
    c.JupyterHub.internal_certs_location = "/srv/certificates"
    add_services(c, cull_idle_after=3600)
    command = service_of(c, "idle-culler")["command"]
    assert command[3:6] == [
        *("--timeout=3600", "--ssl-enabled=True"),
        "--internal-certs-location=/srv/certificates",
    ]


@pytest.mark.parametrize("url", ["https://127.0.0.1:10190", "http://10.0.0.5:10190", "127.0.0.1"])
def test_a_service_that_internal_ssl_does_not_reach_is_refused(url: str) -> None:
    c = Config()
    add_services(c, url=url)  # whatever it is without internal_ssl
    c = Config()
    c.JupyterHub.internal_ssl = True
    with pytest.raises(ConfigError, match="internal_ssl"):
        add_services(c, url=url)


def test_mistakes_are_sentences() -> None:
    c = Config()
    with pytest.raises(ConfigError, match="cull_idle_after is 0"):
        add_services(c, cull_idle_after=0)
    c = Config()
    add_services(c)
    with pytest.raises(ConfigError, match="two services named 'gpu'"):
        add_services(c)
    add_services(c, name="gpu2", url="http://127.0.0.1:10191")
    assert USER_SCOPE in role_of(c, "user")["scopes"]
    assert "access:services!service=gpu2" in role_of(c, "user")["scopes"]


def test_the_package_itself_is_cheap_to_import() -> None:
    code = (
        "import sys, gpuspawner; print(gpuspawner.__version__); "
        "print(sorted({'sqlalchemy', 'tornado', 'traitlets', 'docker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [gpuspawner.__version__, "[]"]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gpuspawner.no_such_name  # that it is absent is the test


@pytest.mark.parametrize("how", ["nothing", "list", "insert"])
def test_our_pages_come_after_the_admins_and_before_the_hubs(how: str) -> None:
    c = Config()
    if how == "list":
        c.JupyterHub.template_paths = ["/mine"]
    elif how == "insert":
        c.JupyterHub.template_paths.insert(0, "/mine")
    gpuspawner.add_services(c)
    app = JupyterHub(config=c)
    ours = app.template_paths.index(str(TEMPLATES))
    theirs = app.template_paths.index("/mine") if how != "nothing" else -1
    assert theirs < ours
    base = [path for path in app.template_paths if path.endswith("jupyterhub/templates")]
    assert all(ours < app.template_paths.index(path) for path in base)


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([], Reach()),
        ([READ_ACCOUNTS, "self"], Reach()),
        ([GRANT], Reach(everybody=True)),
        ([f"{GRANT}!group=ml", GRANT], Reach(everybody=True)),
        ([f"{GRANT}!group=ml", f"{GRANT}!group=a=b"], Reach(groups=frozenset({"ml", "a=b"}))),
        ([f"{GRANT}!user=ada", f"{READ_ACCOUNTS}!user=bob"], Reach(users=frozenset({"ada"}))),
        ([f"{GRANT}!user", f"{GRANT}!group=", f"{GRANT}!server=ada/x", f"{GRANT}ed"], Reach()),
    ],
)
def test_whom_a_scope_reaches(held: list[str], found: Reach) -> None:
    assert reach(held, GRANT) == found
    assert bool(found) is bool(found.everybody or found.accounts())


@pytest.mark.parametrize("how", ["none", "set", "update", "theirs"])
def test_pages_stand_beside_what_the_admin_set(how: str) -> None:
    c = Config()
    if how in ("set", "theirs"):
        c.JupyterHub.extra_handlers = [(r"/mine", object)]
        c.JupyterHub.template_vars = {"colour": "green"}
        c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
    if how == "theirs":
        c.JupyterHub.tornado_settings["compress_response"] = True
    if how == "update":
        c.JupyterHub.tornado_settings.update({"slow_spawn_timeout": 1})
    add_services(c, name="gpus")
    routes = [route for route, _ in value_of(c, "extra_handlers")]
    assert routes[-len(PAGES) :] == [route for route, _ in PAGES]
    assert (r"/mine" in routes) == (how in ("set", "theirs"))

    def seen(setting: str) -> dict[str, Any]:
        value = c.JupyterHub[setting]
        return dict(value.get_value({}) if isinstance(value, LazyConfigValue) else value)

    assert seen("template_vars")["gpuspawner_service"] == "gpus"
    assert ("transforms" in seen("tornado_settings")) == (how != "theirs")
    assert ("slow_spawn_timeout" in seen("tornado_settings")) == (how != "none")


def test_every_page_can_be_imported() -> None:
    for _, name in PAGES:
        assert issubclass(import_object(name), RequestHandler)
