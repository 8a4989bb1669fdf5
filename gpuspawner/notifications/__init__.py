"""Notices: the outbox and the channels."""
