"""The ends of a container's attachment. Real: sockets, with Docker's frames in any pieces."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.engines.attached import Channel, NotWarm


def frame(text: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BxxxL", stream, len(text)) + text


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours), theirs
    ours.close()
    theirs.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cuts=st.lists(st.integers(1, 60), max_size=8), sizes=st.lists(st.integers(1, 9), max_size=9))
def test_a_line_is_heard_in_whatever_pieces_it_comes(cuts: list[int], sizes: list[int]) -> None:
    text, frames, at = b"a banner\ngpuspawner: waiting\nmore", b"", 0
    for size in [*sizes, len(text)]:
        frames += frame(text[at : at + size]) if at < len(text) else b""
        at += size
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, at = Channel(ours), 0
        for cut in [*cuts, len(frames)]:
            theirs.sendall(frames[at : at + cut])
            at += cut
        assert channel.hear("gpuspawner: waiting", timeout=5) == "gpuspawner: waiting"


def test_it_waits_no_longer_than_it_is_told(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(frame(b"something else\n"))
    with pytest.raises(NotWarm, match=r"did not say 'this' within 0 seconds"):
        channel.hear("this", timeout=0.2)


def test_an_end_is_no_answer(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    assert channel.quiet()
    theirs.close()
    assert not channel.quiet()
    with pytest.raises(NotWarm, match="it ended"):
        channel.hear("this", timeout=5)


def test_what_is_closed_here_ends_there(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.say("all of it")
    channel.close()
    channel.close()
    assert theirs.recv(100) == b"all of it\n" and theirs.recv(100) == b""
    assert not channel.quiet()
