"""An image registry on 127.0.0.1, as small as the distribution protocol allows.

It is as slow as it is told, and can lie, stop or hang in the middle. Docker takes plain HTTP
from 127.0.0.1 without being told to.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import random
import re
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import IO, Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
CHUNK = 64 * 1024

Layer = tuple[str, dict[str, Any]]
"""The digest of a layer's files, and what a manifest says of it."""


class SlowRegistry:
    """``with SlowRegistry(size=..., rate=...) as registry``.

    ``size`` is the bytes of each image's random layer, which no engine can have already, and
    ``rate`` the bytes a second of each blob.
    """

    def __init__(self, *, size: int, rate: int = 1_000_000_000, host: str = "127.0.0.1") -> None:
        """``host``: where it listens; Docker takes plain HTTP from others only if told to."""
        self.size = size
        self.host = host
        self.rate = rate
        self.stops_after: int | None = None
        """Bytes of a blob after which the connection breaks."""
        self.hangs_after: int | None = None
        """Bytes of a blob after which nothing more comes, until :meth:`go_on`."""
        self.lies = False
        """Whether blobs are of the right size and hold something else."""
        self.moved: dict[str, str] = {}
        """What is sent for a manifest's digest: another digest's manifest."""
        self.sent = 0
        """Bytes of blobs that went out."""
        self.sending = 0
        """Answers that are on their way out just now."""
        self._counting = Lock()
        self._goes_on = Event()
        self._blobs: dict[str, bytes] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        """What manifests say of the layers of saved images, by the digest of their files."""
        self._manifests: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer((host, 0), _handler(self))

    def __enter__(self) -> SlowRegistry:
        Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()

    @property
    def repository(self) -> str:
        """The name under which an engine of this machine pulls; a tag comes after it."""
        return f"{self.host}:{self._server.server_address[1]}/large"

    def add(self, tag: str, files: Mapping[str, bytes], settings: Mapping[str, Any]) -> None:
        """Make an image of ``files`` (path to content), with its settings in Docker's words.

        It takes a moment, which a pull should not pay for.
        """
        self._add(tag, [self._layer(_tar(files)), self._random(tag)], settings)

    def add_saved(self, tag: str, saved: IO[bytes], settings: Mapping[str, Any]) -> None:
        """Make an image of one that ``docker save`` wrote, with settings in place of its own, and
        a random layer. An engine pulls the saved layers once, whatever images have them."""
        with tarfile.open(fileobj=saved) as tar:
            manifest = json.loads(_content(tar, "manifest.json"))[0]
            tars = [_content(tar, name) for name in manifest["Layers"]]
            layers = {_digest(each): each for each in tars}
            own = json.loads(_content(tar, manifest["Config"]))["config"]
        for digest in layers.keys() - self._saved.keys():
            packed = gzip.compress(layers[digest], compresslevel=0, mtime=0)
            self._saved[digest] = self._keep(LAYER, packed)
        saved_layers = [(digest, self._saved[digest]) for digest in layers]
        self._add(tag, [*saved_layers, self._random(tag)], {**own, **settings})

    def digest(self, tag: str) -> str:
        """The digest of an image's manifest."""
        return _digest(self._manifests[tag])

    def retag(self, tag: str, other: str) -> None:
        """Have ``tag`` mean what ``other`` does."""
        self._manifests[tag] = self._manifests[other]

    def hang(self) -> None:
        """End no layer of some size from here on, until :meth:`go_on`."""
        self._goes_on.clear()
        self.hangs_after = CHUNK

    def go_on(self) -> None:
        """Let every blob that hangs be sent to its end."""
        self.hangs_after = None
        self._goes_on.set()

    def _random(self, tag: str) -> Layer:
        return self._layer(_tar({"var/random": random.Random(tag).randbytes(self.size)}))

    def _layer(self, tar: bytes) -> Layer:
        """A layer that no engine has: the time of its packing is in it."""
        return _digest(tar), self._keep(LAYER, gzip.compress(tar, compresslevel=0))

    def _add(self, tag: str, layers: Sequence[Layer], settings: Mapping[str, Any]) -> None:
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(settings),
            "rootfs": {"type": "layers", "diff_ids": [digest for digest, _ in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._keep(CONFIG, json.dumps(config).encode()),
            "layers": [told for _, told in layers],
        }
        self._manifests[tag] = json.dumps(manifest).encode()

    def forget(self, tag: str) -> None:
        """Free the memory of an image."""
        manifest = json.loads(self._manifests.pop(tag))
        for part in [manifest["config"], *manifest["layers"]]:
            if part not in self._saved.values():
                self._blobs.pop(part["digest"], None)

    def manifest(self, reference: str) -> bytes | None:
        """The manifest with this tag or digest."""
        by_digest = {_digest(text): text for text in self._manifests.values()}
        wanted = self.moved.get(reference, reference)
        return self._manifests.get(wanted) or by_digest.get(wanted)

    def blob(self, digest: str) -> bytes | None:
        return self._blobs.get(digest)

    def may_send(self, sent: int) -> bool:
        """Whether a blob goes on after so many bytes. Hangs where it was told to."""
        if self.hangs_after is not None and sent >= self.hangs_after:
            self._goes_on.wait()
        return self.stops_after is None or sent < self.stops_after

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """An answer is being sent meanwhile."""
        with self._counting:
            self.sending += 1
        try:
            yield
        finally:
            with self._counting:
                self.sending -= 1

    def _keep(self, kind: str, blob: bytes) -> dict[str, Any]:
        self._blobs[_digest(blob)] = blob
        return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _handler(registry: SlowRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            what, _, name = self.path.rpartition("/")
            if self.path == "/v2/":
                self._answer(200, b"{}", {"Content-Type": "application/json"})
            elif what.endswith("/manifests") and (text := registry.manifest(name)):
                told = {"Content-Type": MANIFEST, "Docker-Content-Digest": _digest(text)}
                self._answer(200, text, told)
            elif what.endswith("/blobs") and (blob := registry.blob(name)):
                self._send_blob(blob)
            else:
                code = "MANIFEST_UNKNOWN" if what.endswith("/manifests") else "BLOB_UNKNOWN"
                words = {"errors": [{"code": code, "message": code.replace("_", " ").lower()}]}
                kind = {"Content-Type": "application/json"}
                self._answer(404, json.dumps(words).encode(), kind)

        do_HEAD = do_GET

        def _send_blob(self, blob: bytes) -> None:
            """From where the engine broke off, if it did."""
            if registry.lies:
                blob = bytes(reversed(blob))
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            first = int(asked[1]) if asked else 0
            told = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
            if asked:
                told["Content-Range"] = f"bytes {first}-{len(blob) - 1}/{len(blob)}"
            self._answer(206 if asked else 200, blob, told, first, slow=True)

        def _answer(
            self,
            code: int,
            body: bytes,
            headers: dict[str, str],
            first: int = 0,
            slow: bool = False,
        ) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body) - first))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            # Whoever gives up a pull closes the connection: that is no error here.
            with contextlib.suppress(ConnectionError), registry.counted():
                for start in range(first, len(body), CHUNK):
                    if slow and not registry.may_send(start):
                        self.close_connection = True
                        return
                    self.wfile.write(body[start : start + CHUNK])
                    if slow and len(body) > CHUNK:
                        registry.sent += CHUNK
                        time.sleep(CHUNK / registry.rate)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
