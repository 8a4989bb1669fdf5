"""What is remembered: the schema, transactions, and rows to and from the model."""

from __future__ import annotations

from . import (
    book,
    devices,
    leases,
    schema_batch,
    schema_clock,
    schema_files,
    schema_health,
    schema_members,
    schema_totals,
    schema_use,
)
from .store import Store, default_url

__all__ = [
    "Store",
    "book",
    "default_url",
    "devices",
    "leases",
    "schema_batch",
    "schema_clock",
    "schema_files",
    "schema_health",
    "schema_members",
    "schema_totals",
    "schema_use",
]
