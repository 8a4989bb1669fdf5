"""Whose turn it is. Pure: no I/O, no clock but the time passed in, no randomness."""
