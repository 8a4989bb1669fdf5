"""Members: memberships and the roster."""
