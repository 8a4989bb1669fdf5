"""Notebooks for tests."""

from __future__ import annotations

from typing import Any


def new_notebook(**sources: str) -> dict[str, Any]:
    """Return a notebook that was never executed, by the id of each code cell.

    Each has its id as its tag, too: a run finds its parameters by that.
    """
    return {
        "cells": [
            {
                "cell_type": "code",
                "id": name,
                "source": source,
                "metadata": {"tags": [name]},
                "outputs": [],
                "execution_count": None,
            }
            for name, source in sources.items()
        ],
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
