"""A client of one hub that spawns and stops, and the hub's processor time from outside it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from tests.support.hub import HubProcess


class Members:
    """Spawns and stops members' servers through the REST API, over kept connections."""

    def __init__(self, hub: HubProcess, connections: int = 1) -> None:
        self.hub = hub
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"token {hub.token}"
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=connections)
        self.session.mount("http://", adapter)

    def add(self, names: Iterable[str]) -> None:
        """Create members."""
        answer = self._call("POST", "users", json={"usernames": list(names)})
        answer.raise_for_status()

    def spawn(self, name: str) -> None:
        """Spawn a server, and wait until it is ready."""
        answer = self._call("POST", f"users/{name}/server", json={})
        if answer.status_code == 202:  # it takes longer than the hub waits with its answer
            self.hub.wait_server(name, timeout=300)
        elif answer.status_code != 201:
            raise RuntimeError(f"{name}: {answer.status_code} {answer.text}")

    def stop(self, name: str) -> None:
        """Stop a server, and wait until it is gone."""
        answer = self._call("DELETE", f"users/{name}/server")
        if answer.status_code == 202:
            self.hub.stop_server(name)
        elif answer.status_code != 204:
            raise RuntimeError(f"{name}: {answer.status_code} {answer.text}")

    def spawn_all(self, names: Iterable[str], at_once: int) -> None:
        """Spawn many servers, ``at_once`` at a time."""
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(self.spawn, names))

    def stop_all(self, names: Iterable[str], at_once: int) -> None:
        """Stop many servers, ``at_once`` at a time."""
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(self.stop, names))

    def ask(self, what: str, **parameters: Any) -> Any:
        """A question to the handlers that the benchmark put into the hub."""
        url = f"{self.hub.url}/hub/benchmark/{what}"
        answer = self.session.get(url, params=parameters, timeout=300)
        answer.raise_for_status()
        return answer.json()

    def _call(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        url = f"{self.hub.url}/hub/api/{path}"
        return self.session.request(method, url, timeout=300, **kwargs)


def cpu_seconds(pid: int) -> float:
    """Processor time of another process so far, all of its threads, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's clock id of that process: see clock(3)
