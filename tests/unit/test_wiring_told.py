"""What the service hears of the configuration. Real here: traitlets configuration objects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue

from gpuspawner.config import RENAMED, SECTIONS, add_services
from gpuspawner.core.errors import ConfigError
from gpuspawner.service.app import Accounting


def value_of(c: Config, setting: str) -> Any:
    """What JupyterHub will see of a list setting."""
    value = c.JupyterHub[setting]
    return value.get_value([]) if isinstance(value, LazyConfigValue) else value


def service_of(c: Config, name: str = "gpu") -> dict[str, Any]:
    (found,) = [s for s in value_of(c, "services") if s["name"] == name]
    return dict(found)


def told(c: Config) -> dict[str, Any]:
    """The settings that reach the service, but for where the hub's id is: it always does."""
    found = dict(json.loads(service_of(c)["environment"]["GPUSPAWNER_CONFIG"]))
    assert found.pop("GPUDatabase") == {"hub_id_file": c.GPUDatabase.hub_id_file}
    return found


def test_the_database_url_reaches_the_service_by_environment_alone() -> None:
    c = Config()
    c.GPUDatabase.url = "postgresql://gpu:s3cret@db.example/gpu"
    c.GPUCredits.grace_seconds = 7
    add_services(c)

    service = service_of(c)
    assert service["environment"]["GPUSPAWNER_DATABASE_URL"] == c.GPUDatabase.url
    assert "s3cret" not in " ".join(service["command"])
    assert told(c) == {"GPUCredits": {"grace_seconds": 7}}
    assert c.GPUDatabase.url == "postgresql://gpu:s3cret@db.example/gpu"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sqlite:///gpu.sqlite", "sqlite:///{here}/gpu.sqlite"),
        ("sqlite:///sub/gpu.sqlite?timeout=5", "sqlite:///{here}/sub/gpu.sqlite?timeout=5"),
        ("sqlite:////srv/gpu.sqlite", "sqlite:////srv/gpu.sqlite"),
        ("no url at all", "no url at all"),
    ],
)
def test_a_relative_file_is_the_hubs(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    c = Config()
    c.GPUDatabase.url = given
    add_services(c)
    found = service_of(c)["environment"]["GPUSPAWNER_DATABASE_URL"]
    assert found == meant.format(here=tmp_path)


def test_the_default_database_is_the_hubs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUSPAWNER_DATABASE_URL", raising=False)
    c = Config()
    add_services(c)
    found = service_of(c)["environment"]["GPUSPAWNER_DATABASE_URL"]
    assert found == f"sqlite:///{tmp_path}/gpuspawner.sqlite"

    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", "postgresql:///gpu")
    c = Config()
    add_services(c)
    assert service_of(c)["environment"]["GPUSPAWNER_DATABASE_URL"] == "postgresql:///gpu"


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
def test_the_service_hears_whose_images_it_pulls_ahead(
    settings: dict[str, Any], told_of: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    c = Config(settings)
    add_services(c)
    expected = told_of and told_of.format(here=tmp_path)
    assert told(c).get("Accounting", {}).get("catalog") == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"DockerSpawner": {"image": "lab:1"}, "GPUDockerSpawner": {"gpu_injection": "cdi"}},
            ("lab:1", "cdi"),
        ),
        ({"GPUHealth": {"probe_image": "x"}, "DockerSpawner": {"image": "lab:1"}}, ("x", None)),
        ({"JupyterHub": {"spawner_class": "gpu-local"}}, (None, "process")),
        ({}, (None, None)),
    ],
)
def test_the_service_hears_how_servers_get_gpus(
    settings: dict[str, Any], expected: tuple[str | None, str | None]
) -> None:
    c = Config(settings)
    add_services(c)
    found = told(c).get("GPUHealth", {})
    assert (found.get("probe_image"), found.get("probe_injection")) == expected


def test_settings_of_every_plain_kind_reach_the_service() -> None:
    c = Config()
    c.GPURates.by_model.update({"A100": 4})
    c.GPUCredits.opening_grant = "12.5"
    c.GPUDevices.source = Path("nvml")
    c.GPUCredits.charge_seconds = 5
    c.Accounting.engines = {"docker"}
    c.GPUNotifications.channels = {"mail": "mailto://mail.example?to={address}"}
    add_services(c)

    assert told(c) == {
        "GPURates": {"by_model": {"*": 1, "A100": 4}},
        "GPUCredits": {"opening_grant": "12.5", "charge_seconds": 5},
        "GPUDevices": {"source": "nvml"},
        "Accounting": {"engines": ["docker"]},
        "GPUNotifications": {"channels": {"mail": "mailto://mail.example?to={address}"}},
    }
    c.GPURates.by_model.update({"T4": 2})
    assert c.GPURates.by_model.get_value({"*": 1}) == {"*": 1, "A100": 4, "T4": 2}


def test_the_service_gets_the_variables_that_channels_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAT_TOKEN", "MAIL_PASSWORD", "OTHER_SECRET"):
        monkeypatch.setenv(name, f"the {name}")
    c = Config()
    c.GPUNotifications.channels = {
        "chat": {"url": "mmosts://chat.example/{env:CHAT_TOKEN}?channels={address}"},
        "mail": "mailtos://me:{env:MAIL_PASSWORD}@mail.example?to={address}",
        "gone": "json://chat.example/{env:NOT_THERE}",
    }
    add_services(c)

    environment = service_of(c)["environment"]
    assert environment["CHAT_TOKEN"] == "the CHAT_TOKEN"
    assert environment["MAIL_PASSWORD"] == "the MAIL_PASSWORD"
    assert "OTHER_SECRET" not in environment and "NOT_THERE" not in environment


def test_a_setting_that_cannot_be_handed_on_is_named() -> None:
    c = Config()
    c.GPUCredits.help_text = lambda: "ask me"
    with pytest.raises(ConfigError, match=r"c\.GPUCredits\.help_text"):
        add_services(c)

    c = Config()
    c.GPUSessions.warn_minutes.append(5)
    with pytest.raises(ConfigError, match=r"c\.GPUSessions\.warn_minutes = "):
        add_services(c)


def test_what_docker_and_postgresql_need_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2376")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/etc/docker/client")
    monkeypatch.setenv("PGPASSFILE", "/etc/gpu.pgpass")
    monkeypatch.setenv("CONFIGPROXY_AUTH_TOKEN", "not yours")
    c = Config()
    add_services(c)

    environment = service_of(c)["environment"]
    assert environment["DOCKER_HOST"] == "tcp://127.0.0.1:2376"
    assert environment["DOCKER_TLS_VERIFY"] == "1"
    assert environment["DOCKER_CERT_PATH"] == "/etc/docker/client"
    assert environment["PGPASSFILE"] == "/etc/gpu.pgpass"
    assert environment["GPUSPAWNER_HUB_PID"] == str(os.getpid())
    assert "CONFIGPROXY_AUTH_TOKEN" not in environment
    assert all(isinstance(value, str) for value in environment.values())


def test_the_hubs_id_is_beside_its_cookie_secret() -> None:
    c = Config()
    c.JupyterHub.cookie_secret_file = "/srv/hub/secret"
    add_services(c)
    told(c)
    assert c.GPUDatabase.hub_id_file == "/srv/hub/gpuspawner_hub_id"


def test_the_hubs_id_stays_where_the_admin_puts_it() -> None:
    c = Config()
    c.GPUDatabase.hub_id_file = "/etc/hub_id"
    add_services(c)
    told(c)
    assert c.GPUDatabase.hub_id_file == "/etc/hub_id"


def test_the_service_is_told_of_every_section_that_it_reads() -> None:
    assert {*SECTIONS} == {each.__name__ for each in Accounting.classes} | {Accounting.__name__}


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_that_has_another_name_now_is_named(old: str) -> None:
    """traitlets says nothing of a section that no class reads."""
    section, _, name = old.partition(".")
    known = {each.__name__: each for each in Accounting.classes}
    if new := RENAMED[old]:
        now, _, trait = new.partition(".")
        assert trait in known[now].class_trait_names(config=True)
    with pytest.raises(ConfigError, match=rf"c\.{old} is {f'c.{new}' if new else 'no setting'}"):
        add_services(Config({section: {name: 1}}))
