"""What our services may do at the Hub: the least that they can work with."""

from __future__ import annotations

ACCOUNTING_SCOPES = ("list:users", "servers")
"""All that the accounting service may do: see which servers there are, stop one, and start again
one that waited in line when the hub went down."""

CULLER_SCOPES = ("list:users", "read:users:activity", "read:servers", "delete:servers")
"""All that the idle culler may do."""
