"""A real nginx in front of a hub, with hub_config/nginx.conf as its only servers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import requests

from tests.support import processes
from tests.support.processes import LIVE, REPO, end_process, free_port, system_path, wait_for

SHIPPED = REPO / "hub_config" / "nginx.conf"
NAME = "127.0.0.1"

AROUND = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/gpuspawner.conf;
}}
"""
"""What the Debian package has in /etc/nginx/nginx.conf, with everything in a folder of its own."""


class Nginx:
    """``with Nginx(folder, hub.port, certificate) as nginx``: at ``nginx.url``.

    ``certificate`` is a PEM file with certificate and key for 127.0.0.1.
    """

    name = "nginx"

    def __init__(self, folder: Path, hub_port: int, certificate: Path) -> None:
        self.folder = folder
        self.certificate = certificate
        self.http, self.https = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nginx.conf").write_text(AROUND.format(folder=folder))
        (folder / "gpuspawner.conf").write_text(self._edited(SHIPPED.read_text(), hub_port))

    @property
    def url(self) -> str:
        """The hub as a browser sees it, without a slash at the end."""
        return f"https://{NAME}:{self.https}"

    def __enter__(self) -> Nginx:
        program = shutil.which("nginx", path=system_path())
        assert program, "no nginx is installed: run scripts/test_parts.sh"
        command = [program, "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")]
        processes.run([*command, "-t"])
        self._process = subprocess.Popen(
            processes.die_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        LIVE.append(self)
        wait_for(self._answers, "nginx to answer")
        return self

    def __exit__(self, *_: object) -> None:
        LIVE.remove(self)
        if self._process:
            end_process(self._process.pid)
            self._process.wait()

    def log_text(self) -> str:
        log = self.folder / "nginx.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _answers(self) -> bool:
        try:
            requests.get(self.url, verify=str(self.certificate), timeout=5, allow_redirects=False)
        except requests.RequestException:
            return False
        return True

    def _edited(self, text: str, hub_port: int) -> str:
        """The admin's edits: name and certificate; and ports that anybody may listen on."""
        folder = "/etc/letsencrypt/live/gpu.example.org"
        for old, new in {
            f"{folder}/fullchain.pem": str(self.certificate),
            f"{folder}/privkey.pem": str(self.certificate),
            "gpu.example.org": NAME,
            "listen 80;": f"listen 127.0.0.1:{self.http};",
            "listen 443 ssl;": f"listen 127.0.0.1:{self.https} ssl;",
            "http://127.0.0.1:8000": f"http://127.0.0.1:{hub_port}",
        }.items():
            assert old in text, f"{SHIPPED} has no {old!r} any more"
            text = text.replace(old, new)
        return text
