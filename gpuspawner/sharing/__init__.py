"""Devices that several leases use at the same time."""
