"""Runs: notebooks and commands with a lease and without a server of the Hub's."""
