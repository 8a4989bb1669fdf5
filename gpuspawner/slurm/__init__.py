"""Slurm as the external scheduler, for several machines."""
