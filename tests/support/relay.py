"""A port of 127.0.0.1 in one network that leads to the same address in another one.

``python -m tests.support.relay PID PORT TO_PID TO_PORT``, as root: a network is named by a process
in it. It writes a line once it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys


def enter(pid: int) -> None:
    """Make this process's next sockets in the network of another one."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {pid}")
    finally:
        os.close(descriptor)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def serve(listener: socket.socket, port: int) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(back):
                await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(pass_on, sock=listener)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    pid, port, to_pid, to_port = map(int, sys.argv[1:])
    enter(pid)
    listener = socket.create_server(("127.0.0.1", port))
    enter(to_pid)
    asyncio.run(serve(listener, to_port))
