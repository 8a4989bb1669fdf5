"""What is inside an image: its Python packages, as its own Python lists them."""

from __future__ import annotations

import docker
import requests
from docker.errors import DockerException

from .probe import output_of, scratch_config, scratch_container

_LIST = """
exec python3 -c '
from importlib.metadata import distributions
for found in distributions():
    print("package", found.metadata["Name"], found.version)
'
"""


def packages_of(client: docker.APIClient, image: str) -> dict[str, str]:
    """Version by name of a package, in the order of their names; none where nobody can say."""
    config = scratch_config(image, _LIST, {}, {"NetworkMode": "none"})
    try:
        with scratch_container(client, config) as container:
            client.start(container)
            printed = output_of(client, container)
    except (DockerException, requests.RequestException, OSError):
        return {}
    lines = [line.split(" ") for line in printed.splitlines()]
    found = {words[1]: words[2] for words in lines if words[0] == "package" and len(words) == 3}
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))
