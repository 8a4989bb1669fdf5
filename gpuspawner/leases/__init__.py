"""Leases: granted, extended, released and reconciled."""
