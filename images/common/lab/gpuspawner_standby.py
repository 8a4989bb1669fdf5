"""A Python kernel that has done its imports before anybody asks for one.

    python [flags] gpuspawner_standby.py -m ipykernel_launcher

It waits on its standard input for an order, as JSON: a kernel's command, folder and environment.
Then it becomes that kernel: the same process, a child of the same server. Without an order (the
server ended, or nobody needed a kernel) it ends.

What it has imported must be what the command would import now. If that is in doubt, it becomes the
command itself by exec, which starts as usual. It runs with Python 3.8 or later.
"""

import contextlib
import importlib
import json
import os
import runpy
import site
import sys
import time

LAUNCHER = "ipykernel_launcher"

NEEDED = ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell")
HELPFUL = (
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "psutil",
    "sqlite3",
    "tornado.platform.asyncio",
)
"""What a kernel imports while it starts, and while it works out its first cell."""

MAY_DIFFER = ("JPY_SESSION_NAME",)
"""Variables that differ between kernels, and that nobody reads before a kernel starts."""


class Standby:
    """What was true when the imports began."""

    def __init__(self):
        self.began = time.time()
        self.environment = dict(os.environ)
        # "-m" would have the folder first; this file's own folder stands there instead.
        self.has_folder = not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated)
        if self.has_folder:
            del sys.path[0]
        self.folders = self._folders()
        self.whole = self._import()

    def why_not(self, environment):
        """Why what was imported may not be what a kernel would import now; empty if it is."""
        if not self.whole:
            return "its modules could not be imported"
        names = set(self.environment) | set(environment)
        told = (n for n in names if self.environment.get(n) != environment.get(n))
        if other := sorted(set(told) - set(MAY_DIFFER)):
            return "other environment variables: " + ", ".join(other)
        if self._folders() != self.folders:
            return "packages were installed since"
        if any(_changed(file) >= self.began for file in _files()):
            return "a module was changed since"
        return ""

    def become(self, command, folder, environment):
        """The kernel, to its end; or the command itself."""
        os.chdir(folder)
        if reason := self.why_not(environment):
            print(f"The kernel is started as usual: {reason}.", file=sys.stderr, flush=True)
            os.execvpe(command[0], command, environment)  # without a shell  # nosec B606
        for name in MAY_DIFFER:
            os.environ.pop(name, None)
        os.environ.update(environment)
        if self.has_folder:
            sys.path.insert(0, os.getcwd())
        sys.argv[:] = command[command.index(LAUNCHER) :]
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)

    def _import(self):
        try:
            for name in NEEDED:
                importlib.import_module(name)
            for name in HELPFUL:
                with contextlib.suppress(ImportError):  # another version, or not installed
                    importlib.import_module(name)
        except Exception:  # the command will say it
            return False
        return True

    def _folders(self):
        """The folders that modules come from; an installation changes one of them."""
        return [(path, _changed(path)) for path in [*sys.path, site.getusersitepackages()]]


def _changed(path):
    """Seconds since 1970; 0 if there is nothing. Not mtime: copying may have set that back."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0


def _files():
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [file for file in found if file]


def _order():
    """All that is written to the standard input, until it is closed."""
    parts = []
    while part := os.read(0, 65536):
        parts.append(part)
    return b"".join(parts)


def main():
    standby = Standby()
    if order := _order():
        standby.become(**json.loads(order))


if __name__ == "__main__":
    main()
