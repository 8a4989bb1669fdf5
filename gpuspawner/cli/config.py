"""The hub's own configuration, so that the command sees what the hub sees."""

from __future__ import annotations

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
from ..core.errors import ConfigError, StoreUnavailable
from ..queue.scheduler import Scheduler
from ..services import Services
from ..settings import ServiceSettings
from . import DEFAULT_FILE

_PASSWORD = re.compile(r"://[^\s:/@]*:([^\s@]+)@")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from a configuration file and the command line."""

    config: Config
    file: Path | None
    """The configuration file, None if there is none."""
    services: ServiceSettings
    """The settings by capability; no database is opened for them."""

    @property
    def database_url(self) -> str:
        """The URL of the hub's database."""
        return self.services.database.url

    def open_services(self) -> Services:
        """Open the services. Raises StoreUnavailable if the file is missing; it is not made."""
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
    """Read the file, by default ``jupyterhub_config.py`` here if it exists. Raises ConfigError."""
    path = Path(file) if file else Path(DEFAULT_FILE)
    found = bool(file) or path.is_file()
    config = read_file(path) if found else Config()
    require_new_names(config)
    if database:
        config.GPUDatabase.url = database
    try:
        services = ServiceSettings.read(config)
    except TraitError as error:
        raise ConfigError(what=f"{error} ({path})") from None
    _check_url(services.database.url)
    return Settings(config, path.resolve() if found else None, services)


def read_file(path: Path) -> Config:
    """Run a configuration file as JupyterHub does, and return the result. Raises ConfigError."""
    loader = PyFileConfigLoader(path.name, path=str(path.resolve().parent))
    try:
        return loader.load_config()
    except ConfigFileNotFound:
        raise ConfigError(f"There is no configuration file {path}. Name it with -f.") from None
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        line = _line(error.__traceback__, path)
        raise ConfigError(
            f"The configuration file {path}{line} does not load: {why}. "
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
    from .hub import open_hub

    named = str(getattr(open_hub(settings.config).spawner, "catalog", ""))
    if not named:
        raise ConfigError(
            "No catalog is set, so there is one environment: the spawner's own image. Name a file, "
            'or set c.GPUSpawnerMixin.catalog = "/etc/gpuspawner/catalog.yaml".'
        )
    return Path(named)
