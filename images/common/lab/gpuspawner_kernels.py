"""The first notebook's kernel does its imports while the browser still loads JupyterLab.

One process (gpuspawner_standby.py) is started a moment after the server began to listen. The first
kernel that is started like the default one becomes that process. All other kernels, and those with
unusual options, are started as usual. So no extra memory is used: the kernel only starts earlier. A
process that nobody needs ends after a while.

``GPUSPAWNER_READY_KERNEL=0`` in a server's environment leaves it out. It runs with Python 3.8 or
later, and does nothing where jupyter_client is older than 7.
"""

import json
import os
import pathlib
import sys
from importlib.metadata import EntryPoint

from jupyter_client.launcher import launch_kernel
from tornado.ioloop import IOLoop

try:
    from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner
except ImportError:
    KernelProvisionerFactory, LocalProvisioner = None, object

AFTER = 1.0
"""Seconds from listening to the start: the browser is given JupyterLab's page first."""

KEEP = 600.0
"""Seconds that a process waits for its kernel."""

LEAST_MEMORY = 2**30
"""Bytes: a server with less has better uses for it."""

STOCK, READY = "local-provisioner", "gpuspawner-ready"
LAUNCHER = ["-m", "ipykernel_launcher"]
STANDBY = str(pathlib.Path(__file__).with_name("gpuspawner_standby.py"))
MOST_BYTES = 32_768
"""The largest order: a pipe takes this much at once, even if nobody reads it yet."""


class Ready:
    """The process that waits to be a kernel, if there is one."""

    def __init__(self, log):
        self._log = log
        self._process = None
        self._start = []
        self._pipe = -1

    def begin(self, command, environment):
        """``command``: a kernel's command, of which the part up to the launcher is used."""
        start = _start_of(command)
        if start is None:
            return
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        words = [*start, STANDBY, *LAUNCHER]
        try:
            self._process = launch_kernel(words, stdin=theirs, env=dict(environment))
            self._start = start
            self._log.info("A kernel is made ready: process %s.", self._process.pid)
        except OSError as error:
            self._log.warning("No kernel is made ready: %s", error)
            self.end()
        finally:
            os.close(theirs)

    def take(self, command, options):
        """The process, which is this kernel from now on; None if it has to be started."""
        if self._process is None:
            return None
        reason = self._why_not(command, options) or self._hand_over(command, options)
        if reason:
            self._log.info("The kernel is started as usual: %s.", reason)
            self.end()
            return None
        process, self._process = self._process, None
        self._close()
        self._log.info("The kernel was ready: process %s.", process.pid)
        return process

    def end(self):
        """End the process: nobody needs it."""
        self._close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _why_not(self, command, options):
        if _start_of(command) != self._start:
            return "it is another kind of kernel than the default one"
        if unusual := sorted(set(options) - {"cwd", "env", "extra_arguments", "kernel_id"}):
            return "it has options of its own: " + ", ".join(unusual)
        if not os.access(os.path.join(options.get("cwd") or ".", ""), os.X_OK):
            return "its folder is not there"
        if self._process.poll() is not None:
            return f"the process that was ready has ended ({self._process.returncode})"
        return ""

    def _hand_over(self, command, options):
        environment = dict(options.get("env") or os.environ)
        environment["JPY_PARENT_PID"] = str(os.getpid())  # as the launcher does
        order = {
            "command": [os.path.expanduser(word) for word in command],
            "folder": os.path.abspath(options.get("cwd") or "."),
            "environment": environment,
        }
        text = json.dumps(order).encode()
        if len(text) > MOST_BYTES:
            return "its environment is very large"
        try:
            written = os.write(self._pipe, text)
        except OSError as error:
            return f"the process that was ready does not listen ({error})"
        return "" if written == len(text) else "the process that was ready does not listen"

    def _close(self):
        if self._pipe != -1:
            os.close(self._pipe)
            self._pipe = -1


class ReadyProvisioner(LocalProvisioner):
    """Starts kernels as usual, except the one that is ready."""

    ready = None

    async def launch_kernel(self, cmd, **kwargs):
        """The parts that the connection is made with."""
        process = self.ready.take(cmd, kwargs) if self.ready else None
        if process is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.process, self.pid = process, process.pid
        self.pgid = process.pid  # it was started as the first of a session
        self.cwd = kwargs.get("cwd", pathlib.Path.cwd())
        return self.connection_info


def _start_of(command):
    """The part before the launcher: an interpreter and its flags; None if there is more."""
    places = [n for n in range(1, len(command)) if list(command[n : n + 2]) == LAUNCHER]
    if not places or not all(word.startswith("-X") for word in command[1 : places[0]]):
        return None
    return list(command[: places[0]])


def default_command(specs, name):
    """The default kernel's command as jupyter_client will make it, or nothing."""
    spec = specs.get_kernel_spec(name)
    if spec.env or spec.metadata.get("kernel_provisioner"):
        return []
    major, minor = sys.version_info[:2]
    names = ("python", f"python{major}", f"python{major}.{minor}")
    return [sys.executable if word in names else word for word in spec.argv[:1]] + spec.argv[1:]


def entry_point():
    """The entry point by which jupyter_client finds the provisioner, as if it were installed."""
    group = KernelProvisionerFactory.GROUP_NAME
    return EntryPoint(READY, "gpuspawner_kernels:ReadyProvisioner", group)


def wanted(environment):
    """Whether this is a server of gpuspawner's, and there is room for it."""
    path = environment.get("PYTHONPATH", "")
    return (
        "GPUSPAWNER_GPU_COUNT" in environment
        and environment.get("GPUSPAWNER_READY_KERNEL") != "0"
        and int(environment.get("MEM_LIMIT") or LEAST_MEMORY) >= LEAST_MEMORY
        # A relative path starts in the kernel's folder, which is not known yet.
        and (not path or all(os.path.isabs(part) for part in path.split(os.pathsep)))
    )


def _jupyter_server_extension_points():
    return [{"module": "gpuspawner_kernels"}]


def _load_jupyter_server_extension(app):
    if KernelProvisionerFactory is None or not wanted(os.environ):
        return
    factory = KernelProvisionerFactory.instance(parent=app)
    if factory.default_provisioner_name != STOCK:
        return  # somebody's own
    ready = Ready(app.log)
    factory.provisioners[READY] = entry_point()
    factory.default_provisioner_name = READY
    ReadyProvisioner.ready = ready

    def begin():
        manager = app.kernel_manager
        if len(manager):  # somebody was quicker
            return
        try:
            command = default_command(app.kernel_spec_manager, manager.default_kernel_name)
        except Exception as error:
            app.log.warning("No kernel is made ready: %s", error)
            return
        ready.begin(command, os.environ)
        loop.call_later(KEEP, ready.end)

    loop = IOLoop.current()
    loop.add_callback(loop.call_later, AFTER, begin)
