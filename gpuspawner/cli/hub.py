"""The hub's settings as JupyterHub itself reads them. Importing JupyterHub is slow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import docker
from docker.utils import kwargs_from_env
from jupyterhub.app import JupyterHub
from traitlets import TraitError
from traitlets.config import Config

from ..core.errors import ConfigError

DEFAULT_HOST = "unix:///var/run/docker.sock"
ENGINE_SECONDS = 20
"""Maximum seconds for one query of the engine."""


@dataclass(frozen=True, slots=True)
class HubSettings:
    """A hub that is configured but not started, and one of its spawners."""

    app: Any
    spawner: Any

    @property
    def kinds(self) -> frozenset[str]:
        """The names of the spawner's classes."""
        return frozenset(cls.__name__ for cls in type(self.spawner).__mro__)

    @property
    def leases_gpus(self) -> bool:
        """True if the spawner leases GPUs."""
        return "GPUSpawnerMixin" in self.kinds

    @property
    def uses_docker(self) -> bool:
        """True if servers run in Docker."""
        return "DockerSpawner" in self.kinds

    @property
    def cluster_file(self) -> str:
        """The file with the nodes of a Slurm cluster; empty if servers run here."""
        return str(self.app.config.GPUSlurm.get("cluster_file", "") or "")

    @property
    def api_url(self) -> str:
        """The URL of the Hub's API for servers."""
        path = self.app.hub.base_url + "api/"
        own = getattr(self.spawner, "hub_connect_url", None)
        if own:
            return own.rstrip("/") + path
        return str(self.app.hub.api_url).rstrip("/") + "/"

    @property
    def bind_address(self) -> tuple[str, int]:
        """Where the Hub listens; an empty address means all of this machine."""
        return self.app.hub.ip, self.app.hub.port

    @property
    def engine_address(self) -> str:
        """The address of the Docker Engine, for people."""
        own = self.spawner.client_kwargs.get("base_url") if self.uses_docker else ""
        return str(own or os.environ.get("DOCKER_HOST") or DEFAULT_HOST)

    @property
    def engine_is_local(self) -> bool:
        """True if the engine runs on this machine, judging by its address."""
        return self.engine_address.startswith(("unix:", "/", "http+unix:"))

    def connect(self, timeout: float = ENGINE_SECONDS) -> docker.APIClient:
        """Return a client with the spawner's own settings; ``timeout`` is in seconds."""
        settings: dict[str, Any] = {"version": "auto", "timeout": timeout}
        if self.uses_docker and self.spawner.tls_config:
            settings["tls"] = docker.tls.TLSConfig(**self.spawner.tls_config)
        settings.update(kwargs_from_env())
        if self.uses_docker:
            settings.update(self.spawner.client_kwargs)
        return docker.APIClient(**settings)


def open_hub(config: Config) -> HubSettings:
    """Create the hub's objects without starting anything. Raises ConfigError."""
    try:
        app = JupyterHub(config=config, log_level="ERROR")
        app.init_hub()
        # Some settings of a spawner contain its member's name.
        nobody = SimpleNamespace(
            name="nobody", escaped_name="nobody", settings={}, groups=[], url="/"
        )
        return HubSettings(app, app.spawner_class(config=config, user=nobody))
    except (TraitError, ImportError, AttributeError, ValueError) as error:
        raise ConfigError(what=f"JupyterHub says: {error}") from error


def engine_client(config: Config) -> Callable[[], docker.APIClient]:
    """Return how to reach the Docker Engine of this configuration. Raises ConfigError."""
    return open_hub(config).connect
