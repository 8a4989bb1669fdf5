"""The hub's own configuration, so that the command sees what the hub sees."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import sqlalchemy as sa
from traitlets import TraitError
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader

from ..config import require_new_names
from ..core.errors import ConfigError, GPUSpawnerError, StoreUnavailable
from ..queue.scheduler import Scheduler
from ..services import Services
from ..settings import CONFIG_VARIABLE, ServiceSettings, config_from_environment
from . import DEFAULT_FILE

DEMO_FOLDER = ".demo"
"""Where ``make demo`` keeps its state, unless GPUSPAWNER_DEMO_DIR names another folder."""

NO_HUB = (
    "No hub is found from here. Run this in the hub's working directory, or name the hub's "
    "configuration with -f FILE or its database with --database URL."
)

_PASSWORD = re.compile(r"://[^\s:/@]*:([^\s@]+)@")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the hub that was found, and of the command line."""

    config: Config
    file: Path | None
    """The configuration file, None if there is none."""
    source: str
    """Where the configuration comes from, for people; empty if only defaults are known."""
    services: ServiceSettings
    """The settings by capability; no database is opened for them."""

    @property
    def database_url(self) -> str:
        """The URL of the hub's database."""
        return self.services.database.url

    @property
    def found(self) -> bool:
        """True if a hub was found: its configuration, or at least a database that is there."""
        named = bool(self.source) or "url" in self.config.GPUDatabase
        named = named or "GPUSPAWNER_DATABASE_URL" in os.environ
        return named or self.missing_database() is None

    def describe_hub(self) -> str:
        """Describe in one line which hub the command is about."""
        database = sqlite_path(self.database_url) or shown_url(self.database_url)
        if self.source:
            return f"hub: {self.source} (database {database})"
        return (
            f"hub: database {database}, without its configuration: rates, limits and devices are "
            "not known (name it with -f FILE)"
        )

    def require_hub(self) -> None:
        """Raise ConfigError if no hub was found: the defaults are not a site's settings."""
        if not self.found:
            raise ConfigError(NO_HUB)

    def require_configuration(self, what: str, *, file: bool = False) -> None:
        """Raise ConfigError if only the hub's database is known, which does not say ``what``.

        ``file``: the accounting service's part of the configuration does not say it either.
        """
        self.require_hub()
        if not self.source or (file and self.file is None):
            raise ConfigError(
                f"Only the hub's configuration says {what}: name it with -f FILE, or run this in "
                "the hub's working directory."
            )

    def open_services(self) -> Services:
        """Open the hub's services.

        Raises ConfigError if no hub was found, and StoreUnavailable if its database file is
        missing; it is not made.
        """
        self.require_hub()
        if (missing := self.missing_database()) is not None:
            raise StoreUnavailable(
                f"There is no database at {missing}. Run this in the hub's working directory, name "
                "the database with --database, or start the hub once: it makes the database."
            )
        return Services(self.config)

    def scheduler(self) -> Scheduler:
        """Return the hub's scheduler, with an empty queue; no database is opened for it."""
        return self.services.queue.make_scheduler()

    def missing_database(self) -> Path | None:
        """Return the absolute path of the SQLite file if it does not exist."""
        path = sqlite_path(self.database_url)
        return path if path is not None and not path.exists() else None


def load(file: str | None, database: str | None) -> Settings:
    """Read the configuration of the hub that the command is about. Raises ConfigError.

    That is the file, else the accounting service's configuration in the environment, else
    ``jupyterhub_config.py`` here, else the demo's. ``database`` takes the place of its URL.
    """
    config, path, source = _find(file)
    require_new_names(config)
    if database:
        config.GPUDatabase.url = database
    try:
        services = ServiceSettings.read(config)
    except TraitError as error:
        raise ConfigError(what=f"{error} ({source})") from None
    _check_url(services.database.url)
    return Settings(config, path, source, services)


def _find(file: str | None) -> tuple[Config, Path | None, str]:
    """Return the configuration, its file, and where it comes from."""
    if not file and CONFIG_VARIABLE in os.environ:
        return config_from_environment(), None, f"{CONFIG_VARIABLE} in the environment"
    demo = Path(os.environ.get("GPUSPAWNER_DEMO_DIR") or DEMO_FOLDER).resolve()
    for path in [Path(file)] if file else [Path(DEFAULT_FILE), demo / DEFAULT_FILE]:
        if file or path.is_file():
            found = path.resolve()
            source = f"demo at {demo}" if found.parent == demo else str(found)
            return read_file(path), found, source
    return Config(), None, ""


def read_file(path: Path) -> Config:
    """Run a configuration file as JupyterHub does, and return the result. Raises ConfigError."""
    loader = PyFileConfigLoader(path.name, path=str(path.resolve().parent))
    try:
        return loader.load_config()
    except ConfigFileNotFound:
        raise ConfigError(f"There is no configuration file {path}. Name it with -f.") from None
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, GPUSpawnerError):
            why = error.message
        line = _line(error.__traceback__, path)
        raise ConfigError(
            f"The configuration file {path}{line} does not load: {why.rstrip('.')}. "
            "The hub would stop here too."
        ) from error


def _check_url(url: str) -> None:
    try:
        sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        what = (
            "the database URL cannot be read; write it like sqlite:////srv/hub.sqlite or "
            "postgresql://USER:PASSWORD@HOST/NAME, with special characters of the password as %XX"
        )
        raise ConfigError(what=what) from None


def sqlite_path(url: str) -> Path | None:
    """Return the absolute path of the file in an SQLite URL; None for other URLs."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    return Path(parsed.database).resolve()


def shown_url(url: str) -> str:
    """Return a database URL without its password, for output."""
    return redact(url, passwords(url))


def passwords(*texts: str) -> tuple[str, ...]:
    """Return the passwords in URLs, even if they cannot be parsed."""
    found = [match for text in texts for match in _PASSWORD.findall(text)]
    for text in texts:
        try:
            found.append(str(sa.make_url(text).password or ""))  # without its %-escapes
        except (sa.exc.ArgumentError, ValueError):
            continue
    return tuple(sorted({p for p in found if p}, key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Return the text with every secret replaced."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _line(trace: TracebackType | None, path: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(trace) if Path(f.filename).name == path.name]
    return f", line {lines[-1]}," if lines else ""


def catalog_file(file: str | None, settings: Settings) -> Path:
    """Return the catalog named by the command, or by the configuration. Raises ConfigError."""
    if file:
        return Path(file)
    settings.require_configuration("which environments there are", file=True)
    from .hub import open_hub

    named = str(getattr(open_hub(settings.config).spawner, "catalog", ""))
    if not named:
        raise ConfigError(
            "No catalog is set, so there is one environment: the spawner's own image. Name a file, "
            'or set c.GPUSpawnerMixin.catalog = "/etc/gpuspawner/catalog.yaml".'
        )
    return Path(named)
