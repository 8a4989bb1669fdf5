"""The ledger's pure rules: values in, values out. No I/O, no clock but the one passed in."""

from __future__ import annotations
