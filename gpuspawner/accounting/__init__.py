"""The accounting service: charges every minute, compares what is with what should be, and
shows members and admins what it costs. Run by the Hub as ``python -m gpuspawner.accounting``."""
