"""A server that answers with the devices that CUDA shows it, in place of Jupyter's.

Run as ``c.Spawner.cmd``. A process of its own looks each time, as a kernel of the server would.
"""

from __future__ import annotations

import json

from tests.support.cuda import Program
from tests.support.tiny_server import Answer, serve


class Devices(Answer):
    def body(self) -> bytes:
        if not self.path.endswith("/devices"):
            return b"[]"
        with Program() as program:
            return json.dumps(program.tell("uuids")).encode()


if __name__ == "__main__":
    serve(Devices)
