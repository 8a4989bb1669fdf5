"""How the engines of a cluster's nodes are reached."""

from __future__ import annotations

from collections.abc import Callable

import docker

from .cluster import Node

QUICK = 3.0
"""Seconds that a node may take to answer, when it is asked all the time."""

MOST_AT_ONCE = 8
"""Nodes that are asked at once."""


class _Client(docker.APIClient):
    """A client that trusts what ``cluster.yaml`` names. requests would put the certificates and
    proxies in their place that the environment has for the internet."""

    trust_env = property(lambda self: False, lambda self, value: None)


def connector(node: Node, timeout: float = 20) -> Callable[[], docker.APIClient]:
    """What makes a client of a node's engine."""

    def connect() -> docker.APIClient:
        return _Client(version="auto", timeout=timeout, **node.client_settings())

    return connect


def reach(node: Node) -> Callable[[float], docker.APIClient]:
    """What makes a client of a node's engine, given a timeout in seconds."""
    return lambda timeout: connector(node, timeout)()
