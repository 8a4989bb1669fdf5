"""Slurm, which schedules the GPUs of several machines: what it is told, and what it says.

Only values and commands: who is charged and what a member may have is the broker's, and where a
server runs is the spawner's.
"""
