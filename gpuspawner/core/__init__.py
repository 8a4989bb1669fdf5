"""Shared basics: errors, units, scopes, the clock's rules, configuration files."""
