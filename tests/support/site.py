"""A hub in a box: what somebody types for it who follows the docs, and its members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import requests

from tests.support.box import COPY, Box
from tests.support.http_client import new_session
from tests.support.identity import CLIENT_ID, CLIENT_SECRET, IdentityProvider, sign_in
from tests.support.processes import free_port, wait_for
from tests.support.visitor import Visitor, text_of

CONFIG = "/etc/gpuspawner/jupyterhub_config.py"
CATALOG = "/etc/gpuspawner/catalog.yaml"
SECRET = "cat > /etc/gpuspawner/oauth_client_secret"
"""The command that reads what is pasted."""

ONE_ENVIRONMENT = """
environments:
  - slug: base
    display_name: JupyterLab
    image: gpuspawner/base:latest
    devices: {default: 1, max: 1}
"""
ONE_GPU = {"environment": "base", "gpus": "1"}
"""What the form sends for a server with a GPU in it."""
LIST = 'import subprocess; print(subprocess.check_output(["nvidia-smi", "-L"], text=True))'
"""What a member's cell has, to see its GPUs."""


class Site:
    """A hub in a box, by its address here."""

    def __init__(self, box: Box) -> None:
        self.box = box
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        box.reach(port, of_box=8000)

    def wait(self) -> None:
        """Wait until the hub answers behind its proxy."""

        def answers() -> bool:
            try:
                return requests.get(f"{self.url}/hub/health", timeout=10).ok
            except requests.RequestException:
                return False

        wait_for(answers, "the hub in the box", timeout=60)


class ProviderSite(Site):
    """A hub in a box without a GPU, and the identity provider of its members."""

    def __init__(self, box: Box, folder: Path, members: Sequence[str]) -> None:
        super().__init__(box)
        self.provider = IdentityProvider(
            folder / "identity",
            users={name: ["gpu-members"] for name in members},
            redirect_uri=f"{self.url}/hub/oauth_callback",
        )
        self.typed = {
            "git clone https://YOUR-COPY/gpuspawner": f"cp -r {COPY}",
            "python3 images/build base pytorch": ":",  # they are there
            "OAUTH_CLIENT_ID=YOUR-CLIENT": f"OAUTH_CLIENT_ID={CLIENT_ID}",
            "https://YOUR-PROVIDER/oauth/authorize": self.provider.authorize_url,
            "https://YOUR-PROVIDER/oauth/token": self.provider.token_url,
            "https://YOUR-PROVIDER/oauth/userinfo": self.provider.userdata_url,
            "https://YOUR-HUB/hub/oauth_callback": self.provider.redirect_uri,
        }
        """What is in capitals in the page, or too large here, and what is typed instead."""
        self.edits = {
            CONFIG: {
                # This provider has a member's name in another claim than most.
                'username_claim = "preferred_username"': 'username_claim = "sub"',
                "c.GPURates.by_model =": 'c.GPUDevices.source = "simulated:2xA100-80GB"\n'
                "c.GPURates.by_model =",
            },
            CATALOG: {"gpuspawner/pytorch:": "gpuspawner/base:"},
        }
        """What an admin without a GPU and without PyTorch changes in the two files."""
        box.let_reach(self.provider.port)

    def __enter__(self) -> ProviderSite:
        self.provider.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.provider.stop()

    def edit(self) -> None:
        """Change the two files."""
        for path, changes in self.edits.items():
            text = self.box.run(f"cat {path}")
            for old, new in changes.items():
                assert old in text, f"{path} does not say {old}"
                text = text.replace(old, new)
            self.box.write(path, text)

    def member(self, name: str) -> Visitor:
        """A member who signed in at the provider."""
        session = new_session()
        page = sign_in(session, self.provider, name, self.url)
        assert page.status_code == 200, text_of(page)
        return Visitor(self.url, name, session=session)


SECRETS = f"{CLIENT_SECRET}\n"
