"""Code run in a real kernel or terminal of a running Jupyter server, by REST and websocket."""

from __future__ import annotations

import json
import uuid

import requests
import websocket

from tests.support.processes import PATIENCE, wait_for


class Kernel:
    """A kernel of a running Jupyter server, by REST and websocket."""

    def __init__(self, base: str, token: str, timeout: float) -> None:
        self.base, self.timeout = base, timeout
        self.headers = {"Authorization": f"token {token}"}

    def __enter__(self) -> Kernel:
        def start() -> str | None:
            url = f"{self.base}/api/kernels"
            answer = requests.post(url, headers=self.headers, json={}, timeout=120)
            if answer.status_code in (503, 424):  # up, and the proxy has not heard of it yet
                return None
            answer.raise_for_status()
            return str(answer.json()["id"])

        self.id = wait_for(start, "a kernel", timeout=self.timeout, interval=0.25)
        self._socket = websocket.create_connection(
            f"{self.base.replace('http', 'ws', 1)}/api/kernels/{self.id}/channels",
            header=[f"{k}: {v}" for k, v in self.headers.items()],
            timeout=self.timeout * PATIENCE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        requests.delete(f"{self.base}/api/kernels/{self.id}", headers=self.headers, timeout=120)

    def run(self, code: str) -> str:
        """What the code printed, and its last value; an exception in it raises here."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "session": uuid.uuid4().hex,
            "username": "",
            "msg_type": "execute_request",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "allow_stdin": False}
        message = {"header": header, "content": content, "channel": "shell"}
        self._socket.send(json.dumps({**message, "parent_header": {}, "metadata": {}}))
        printed = []
        while True:
            got = json.loads(self._socket.recv())
            if got["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "stream":
                printed.append(str(content["text"]))
            elif kind == "execute_result":
                printed.append(str(content["data"]["text/plain"]))
            elif kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(printed)


def terminal_run(base: str, token: str, command: str, timeout: float = 120.0) -> str:
    """Type a command into a new terminal of the server at ``base``; what came before its end."""
    headers = {"Authorization": f"token {token}"}
    answer = requests.post(f"{base}/api/terminals", headers=headers, json={}, timeout=timeout)
    answer.raise_for_status()
    name = answer.json()["name"]
    socket = websocket.create_connection(
        f"{base.replace('http', 'ws', 1)}/terminals/websocket/{name}",
        header=[f"{k}: {v}" for k, v in headers.items()],
        timeout=timeout,
    )
    try:
        # The shell echoes what is typed; only what it prints has the two words joined.
        socket.send(json.dumps(["stdin", f"{command}; echo the-''end\r"]))
        seen = ""
        while "the-end" not in seen:
            kind, *text = json.loads(socket.recv())
            if kind == "stdout":
                seen += text[0]
        return seen
    finally:
        socket.close()
        requests.delete(f"{base}/api/terminals/{name}", headers=headers, timeout=timeout)
