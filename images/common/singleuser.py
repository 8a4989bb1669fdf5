#!/opt/venv/bin/python3
"""jupyterhub-singleuser, without what takes more than half of its start and no server needs.

Only this process is concerned: everything stays installed, and other programs import it. Only
the standard library and JupyterHub are used: this runs with Python 3.8 or later.
"""

import contextlib
import gc
import importlib
import sys
import types

COLLECT_AFTER = 50_000
"""New objects after which Python looks for garbage: imports make many, and hardly any garbage."""


class Later(types.ModuleType):
    """Stands for a module that is imported when somebody uses it."""

    def __getattr__(self, name):
        if name.startswith("__"):  # the import system asks for such
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


def without_grammar():
    """jsonschema works out a grammar of IRIs at each start, for which it takes a second.

    Without it an "iri" in a schema is taken as it is.
    """
    sys.modules["rfc3987_syntax"] = None


def without_hub():
    """JupyterHub's log takes one name from the hub's own handlers, its metrics the database.

    A server has neither. With a version where that is otherwise, all is imported as ever.
    """
    sys.modules["jupyterhub.orm"] = Later("jupyterhub.orm")
    handlers = types.ModuleType("jupyterhub.handlers")
    pages = types.ModuleType("jupyterhub.handlers.pages")
    pages.HealthCheckHandler = type("HealthCheckHandler", (), {})
    stand_ins = {module.__name__: module for module in (handlers, pages)}
    sys.modules.update(stand_ins)
    with contextlib.suppress(ImportError):
        importlib.import_module("jupyterhub.log")
    for name in stand_ins:
        del sys.modules[name]


if __name__ == "__main__":
    gc.set_threshold(COLLECT_AFTER)
    without_grammar()
    without_hub()
    from jupyterhub.singleuser import main

    sys.exit(main())
