"""Members' files: workspaces, quotas, shared folders and archives."""
