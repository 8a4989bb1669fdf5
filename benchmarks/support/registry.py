"""A slow image registry on 127.0.0.1, as small as the distribution protocol allows.

Each image has a layer of random bytes that no engine can have already. Docker takes
plain HTTP from 127.0.0.1 without being told to.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
CHUNK = 64 * 1024


class SlowRegistry:
    """``with SlowRegistry(size=..., rate=...) as registry``.

    ``size`` is the bytes of each image's random layer, ``rate`` the bytes a second of all blobs.
    """

    def __init__(self, *, size: int, rate: int) -> None:
        self.size = size
        self.rate = rate
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    def __enter__(self) -> SlowRegistry:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def repository(self) -> str:
        """The name under which an engine of this machine pulls; a tag comes after it."""
        return f"127.0.0.1:{self._server.server_address[1]}/large"

    def add(self, tag: str, files: Mapping[str, bytes], settings: Mapping[str, Any]) -> None:
        """Make an image of ``files`` (path to content), with its settings in Docker's words.

        It takes a moment, which a pull should not pay for.
        """
        random_bytes = random.Random(tag).randbytes(self.size)
        tars = [_tar(files), _tar({"var/random": random_bytes})]
        layers = [gzip.compress(tar, compresslevel=0) for tar in tars]
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(settings),
            "rootfs": {"type": "layers", "diff_ids": [_digest(tar) for tar in tars]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._keep(CONFIG, json.dumps(config).encode()),
            "layers": [self._keep(LAYER, layer) for layer in layers],
        }
        self._manifests[tag] = json.dumps(manifest).encode()

    def forget(self, tag: str) -> None:
        """Free the memory of an image."""
        manifest = json.loads(self._manifests.pop(tag))
        for part in [manifest["config"], *manifest["layers"]]:
            self._blobs.pop(part["digest"], None)

    def manifest(self, reference: str) -> bytes | None:
        """The manifest with this tag or digest."""
        by_digest = {_digest(text): text for text in self._manifests.values()}
        return self._manifests.get(reference) or by_digest.get(reference)

    def blob(self, digest: str) -> bytes | None:
        return self._blobs.get(digest)

    def _keep(self, kind: str, blob: bytes) -> dict[str, Any]:
        self._blobs[_digest(blob)] = blob
        return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _handler(registry: SlowRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            what, _, name = self.path.rpartition("/")
            if self.path == "/v2/":
                self._answer(b"{}", "application/json")
            elif what.endswith("/manifests"):
                self._answer(registry.manifest(name), MANIFEST)
            elif what.endswith("/blobs"):
                self._answer(registry.blob(name), "application/octet-stream")
            else:
                self._answer(None, "")

        do_HEAD = do_GET

        def _answer(self, body: bytes | None, kind: str) -> None:
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            if body is not None:
                self.send_header("Content-Type", kind)
                self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if body is None or self.command == "HEAD":
                return
            for start in range(0, len(body), CHUNK):
                self.wfile.write(body[start : start + CHUNK])
                if len(body) > CHUNK:
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


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
