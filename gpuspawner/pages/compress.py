"""Style sheets and scripts in fewer bytes: JupyterHub's own are half a megabyte as they are."""

from __future__ import annotations

from tornado import httputil
from tornado.web import GZipContentEncoding


class StaticGzip(GZipContentEncoding):
    """Compresses files below ``static/``, which everybody gets alike.

    Not pages: what a page holds of its reader's could be told from its compressed length.
    """

    def __init__(self, request: httputil.HTTPServerRequest) -> None:
        super().__init__(request)
        self._static = "/static/" in request.path and "Range" not in request.headers

    def transform_first_chunk(
        self, status_code: int, headers: httputil.HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, httputil.HTTPHeaders, bytes]:
        if self._static:
            return super().transform_first_chunk(status_code, headers, chunk, finishing)
        self._gzipping = False
        return status_code, headers, chunk
