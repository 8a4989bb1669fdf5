#!/opt/venv/bin/python3
"""jupyterhub-singleuser without imports that take over half of its start and no server needs.

Only this process is affected: everything stays installed for other programs. Only the standard
library and JupyterHub are used: this runs with Python 3.8 or later.
"""

import gc
import importlib
import sys
import types

COLLECT_AFTER = 50_000
"""New objects after which Python looks for garbage: imports make many objects and little
garbage."""


class Later(types.ModuleType):
    """A stand-in for a module, which is imported when somebody uses it."""

    def __getattr__(self, name):
        if name.startswith("__"):  # the import system asks for such
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


def without_grammar():
    """jsonschema works out a grammar of IRIs at each start, which takes a second.

    Without the grammar, jsonschema accepts every text as an "iri".
    """
    sys.modules["rfc3987_syntax"] = None


def import_without(stand_ins, names):
    """Import modules that get these stand-ins; later imports get the real modules.

    If a version needs more than the stand-ins have, the partial imports are dropped, and the
    modules are imported as usual when they are needed.
    """
    before = set(sys.modules)
    places = {module.__name__: module for module in stand_ins}
    sys.modules.update(places)
    try:
        for name in names:
            importlib.import_module(name)
        whole = all(sys.modules.get(place) is module for place, module in places.items())
    except Exception:
        whole = False
    packages = {name.partition(".")[0] for name in [*names, *places]}
    for name in set(sys.modules) - before:
        if name in places or (not whole and name.partition(".")[0] in packages):
            del sys.modules[name]


def without_hub():
    """JupyterHub's log takes one name from the hub's own handlers, its metrics the database, its
    tools an error of SQLAlchemy's, its scopes the queries. A server has none of these.
    """
    sys.modules["jupyterhub.orm"] = Later("jupyterhub.orm")
    database, errors = Later("sqlalchemy"), types.ModuleType("sqlalchemy.exc")
    database.func = None  # only the hub's own roles are looked up by it
    errors.SQLAlchemyError = type("SQLAlchemyError", (Exception,), {})
    import_without([database, errors], ["jupyterhub.utils", "jupyterhub.scopes"])
    handlers = types.ModuleType("jupyterhub.handlers")
    pages = types.ModuleType("jupyterhub.handlers.pages")
    pages.HealthCheckHandler = type("HealthCheckHandler", (), {})
    import_without([handlers, pages], ["jupyterhub.log"])


def without_listings():
    """JupyterLab needs requests only to fetch lists of extensions whose URLs an admin has set."""
    import_without([Later("requests")], ["jupyterlab_server.listings_handler"])


if __name__ == "__main__":
    gc.set_threshold(COLLECT_AFTER)
    without_grammar()
    without_hub()
    without_listings()
    from jupyterhub.singleuser import main

    sys.exit(main())
