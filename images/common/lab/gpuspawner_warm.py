"""A server that has imported itself before anybody asks for one.

It waits at its standard input for what makes it a member's: the environment, the arguments, and
what it must see where the member's workspace is to be. Then it is that member's server. Until
then it knows nobody, listens nowhere, and ends when its standard input does: then the hub that
started it is gone. It runs with Python 3.8 or later.
"""

import contextlib
import gc
import glob
import importlib
import json
import os
import site
import sys
import tempfile

VARIABLE = "GPUSPAWNER_WARM"

NEEDED = ("jupyterhub.singleuser", "jupyterlab.labapp", "jupyter_server.serverapp")
HELPFUL = (
    "IPython.core.completerlib",
    "httpcore",
    "ipykernel.kernelspec",
    "jinja2.ext",
    "jupyter_client.asynchronous",
    "jupyter_core.migrate",
    "jupyter_lsp.virtual_documents_shadow",
    "jupyter_server.services.contents.largefilemanager",
    "jupyter_server.services.kernels.connection.channels",
    "jupyter_server.services.kernels.kernelmanager",
    "jupyter_server.services.sessions.sessionmanager",
    "jupyter_server_fileid.manager",
    "jupyterlab.handlers.build_handler",
    "jupyterlab.handlers.extension_manager_handler",
    "jupyterlab.handlers.plugin_manager_handler",
    "jupyterlab_server.handlers",
    "nbconvert.exporters",
    "notebook_shim.nbserver",
    "sqlite3",
    "terminado",
    "tornado.platform.asyncio",
    "zmq.eventloop.zmqstream",
)
"""What a server imports while it starts, and for its first pages; other versions have others."""


def imported():
    """Import what the server will need. What is not there, it does not need."""
    for name in NEEDED:
        importlib.import_module(name)
    for name in (*HELPFUL, *_services(), *_extensions()):
        with contextlib.suppress(Exception):  # the server says it, if it is one of its own
            importlib.import_module(name)


def _services():
    """The parts of Jupyter Server that it finds by their names when it starts."""
    server = sys.modules["jupyter_server.serverapp"]
    for names in getattr(server, "JUPYTER_SERVICE_HANDLERS", {}).values():
        yield from names or ()


def _extensions():
    """The server's extensions that are turned on for everybody."""
    pattern = os.path.join(sys.prefix, "etc/jupyter/jupyter_server_config.d/*.json")
    for file in sorted(glob.glob(pattern)):
        try:
            with open(file, encoding="utf-8") as stream:
                found = json.load(stream)["ServerApp"]["jpserver_extensions"]
        except (OSError, ValueError, LookupError):
            continue
        for name, on in found.items():
            if on:
                yield name


def say(text):
    print("gpuspawner: " + text, flush=True)


def used_already():
    """Whether this container was a member's before: it was started again without its hub, which
    alone can give it what it lacks."""
    mark = os.path.join(tempfile.gettempdir(), ".gpuspawner-given")
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    except OSError:  # nothing can be written there
        return False
    return False


def why_not(folder, workspace):
    """Why this is not the workspace that the hub mounted; empty if it is."""
    try:
        seen = os.stat(folder)
    except OSError as error:
        return f"the workspace cannot be seen: {error.strerror}"
    if (seen.st_dev, seen.st_ino) != (workspace["device"], workspace["inode"]):
        return "the workspace that the hub mounts does not come into this container"
    return ""


def wait():
    """Until somebody's server is wanted; from then on this process is as if just started."""
    if used_already():
        say("this container was a member's, and is used up")
        sys.exit(3)
    imported()
    here, target = os.getcwd(), os.environ.pop(VARIABLE)
    kernels = sys.modules.get("gpuspawner_kernels")
    if kernels:
        kernels.begin_ahead()
    gc.freeze()  # it stays for good: nobody need look for garbage in it
    say("waiting")
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit(0)
    order = json.loads(line)
    reason = why_not(target, order["workspace"])
    if reason:
        say("refused: " + reason)
        sys.exit(3)
    if kernels:
        kernels.given_later(_differs(order["environment"]))
    os.environ.update(order["environment"])
    sys.argv[1:] = order["arguments"]
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(here)  # what is mounted there now, and not what it hides
    _own_packages()
    say("taken")


def _differs(environment):
    return [name for name, value in environment.items() if os.environ.get(name) != value]


def _own_packages():
    """What the member installed with --user may have come with the workspace."""
    importlib.invalidate_caches()
    folder = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    if folder and folder not in sys.path and os.path.isdir(folder):
        site.addsitedir(folder)
