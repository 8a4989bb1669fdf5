"""GPUs: inventory, topology, placement, drains and health."""
