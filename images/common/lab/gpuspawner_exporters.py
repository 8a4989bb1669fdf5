"""The list of a notebook's export formats, made by a process other than the server.

JupyterLab asks for it when the first notebook is opened, which is when the kernel is connected.
To answer, the server would import all of nbconvert, and answer hardly anything else for that
second. Here a process with low priority makes the same list with the same code; if that fails, the
server makes the list as usual. It runs with Python 3.8 or later.
"""

import asyncio
import json
import os
import sys

from jupyter_server.auth.decorator import authorized
from jupyter_server.services.nbconvert.handlers import NbconvertRootHandler
from jupyter_server.utils import url_path_join
from tornado import web

TIMEOUT = 60.0

LIST = """
import os, sys
os.nice(19)
sys.path = [path for path in sys.path if path]  # not the folder where it runs
import json
from nbconvert.exporters import base
found = {}
for name in base.get_export_names():
    try:
        found[name] = {"output_mimetype": base.get_exporter(name).output_mimetype}
    except ValueError:  # uninstalled meanwhile
        continue
json.dump(found, sys.stdout)
"""


async def exporters(command=(sys.executable, "-c", LIST), timeout=TIMEOUT):
    """The process's answer; None if it makes no sense."""
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE}
    process = None
    try:
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        told, _ = await asyncio.wait_for(process.communicate(), timeout)
        found = json.loads(told)
    except (OSError, ValueError, asyncio.TimeoutError):
        return None
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
    return found if process.returncode == 0 and isinstance(found, dict) else None


class ExportersHandler(NbconvertRootHandler):
    """Tells JupyterLab what a notebook can be exported to."""

    @web.authenticated
    @authorized
    async def get(self):
        found = await exporters()
        if found is None:
            self.log.warning("nbconvert's formats are listed by the server itself.")
            await super().get()
        else:
            self.finish(json.dumps(found))


def _jupyter_server_extension_points():
    return [{"module": "gpuspawner_exporters"}]


def _load_jupyter_server_extension(app):
    if "GPUSPAWNER_GPU_COUNT" not in os.environ:
        return
    path = url_path_join(app.web_app.settings["base_url"], "api", "nbconvert")
    app.web_app.add_handlers(".*$", [(path, ExportersHandler)])
