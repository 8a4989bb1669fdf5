"""Errors of commands as one sentence and an exit code."""

from __future__ import annotations

import sys
import traceback

from sqlalchemy.exc import SQLAlchemyError
from traitlets import TraitError

from ..core.errors import ArchiveRefused, ConfigError, GPUSpawnerError, StoreUnavailable
from .command import Invocation
from .config import passwords, redact

REFUSED, USAGE = 1, 2


def report(error: Exception, invocation: Invocation) -> int:
    """Print what went wrong on stderr, without passwords, and return the exit code."""
    urls = [invocation.database or ""]
    if invocation.settings is not None:
        urls.append(invocation.settings.database_url)
    secrets = passwords(*urls)
    if invocation.debug:
        print(redact(traceback.format_exc(), secrets), file=sys.stderr)
    sentence, code = explain(error)
    print(f"gpuspawner: {redact(sentence, secrets)}", file=sys.stderr)
    return code


def explain(error: Exception) -> tuple[str, int]:
    """Return the sentence and the exit code of an error."""
    if isinstance(error, ConfigError):
        return error.message, USAGE
    if isinstance(error, StoreUnavailable):
        why = f" It says: {_cause(error.__cause__)}" if error.__cause__ else ""
        return f"{error.message}{why}", REFUSED
    if isinstance(error, ArchiveRefused) and error.said:
        return f"{error.message} It says: {error.said}", REFUSED
    if isinstance(error, GPUSpawnerError):
        return error.message, REFUSED
    if isinstance(error, SQLAlchemyError):
        return f"The database refused: {_cause(error)}", REFUSED
    if isinstance(error, TraitError):
        return f"The configuration is not valid: {error}", USAGE
    what = f"Something unexpected went wrong ({type(error).__name__}: {error})."
    return f"{what} Run it again with --debug for the details.", REFUSED


def _cause(error: BaseException) -> str:
    """Return a database error in the database's own words, on one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
