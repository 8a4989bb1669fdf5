"""Shared GPUs: the memory guard of slots, and layouts of MIG instances."""
