"""What JupyterHub 5 lacks."""

from __future__ import annotations

from tornado.web import HTTPError

try:
    from jupyterhub.spawner import SpawnException
except ImportError:  # JupyterHub 5

    class SpawnException(HTTPError):  # type: ignore[no-redef]
        """A start that was refused: JupyterHub 6's class of this name, with the same arguments."""

        def __init__(
            self,
            message: str,
            *,
            reason: str,
            log_message: str = "",
            message_html: str = "",
            status_code: int = 400,
        ) -> None:
            super().__init__(status_code, message, reason=reason)
            self.message = message
            self.message_html = message_html
            self._for_log = log_message or message

        def __str__(self) -> str:
            """Return the text for the log."""
            return f"{self.status_code} {type(self).__name__}: {self._for_log}"


__all__ = ["SpawnException"]
