"""Samples, idle servers, health, usage reports and metrics."""
