"""The server's part of "Finish without me" in JupyterLab: a notebook becomes a run.

The browser asks this server, which copies the notebook and asks the hub with its own token, as the
command `gpuspawner-run` does. It runs with Python 3.8 or later.
"""

import ast
import json
import os
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpuspawner_run import (
    LONGEST_TITLE,
    NoAnswer,
    Refused,
    ask,
    in_workspace,
    snapshot,
    submit_copy,
    workspace,
)
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.ioloop import IOLoop

NEEDED = (
    *("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN", "GPUSPAWNER_LEASE_ID"),
    "GPUSPAWNER_WORKSPACE",  # where a run finds what a session has left
)
NO_VALUE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)

MOST_BYTES = 100 * 2**20
"""The largest notebook that is searched for parameters."""


class Notebooks:
    """The notebooks of this server, and how they become runs."""

    def __init__(self, root):
        self._root = root
        self._copied = {}

    def quote(self, sent):
        """Return what a run would cost, and at first what the notebook lets its reader change."""
        notebook = self._notebook(sent["path"])
        if "options" in sent:
            asked = {name: sent[name] for name in ("options", "preemptible")}
            return {"quote": ask("POST", "/-/quote", asked)}
        if find_spec("papermill") is None:
            raise Refused("this image cannot run notebooks: it lacks papermill. Tell your admin")
        asked = {"lease": os.environ["GPUSPAWNER_LEASE_ID"]}
        if environment := os.environ.get("GPUSPAWNER_ENVIRONMENT"):
            asked["options"] = {"environment": environment}
        return {
            "parameters": {name: shown(value) for name, value in parameters(notebook).items()},
            "quote": ask("POST", "/-/quote", asked),
        }

    def submit(self, sent):
        """Copy the notebook and submit the run; the copy is removed if the run is refused."""
        notebook, key = self._notebook(sent["path"]), sent["key"]
        body = {
            "title": notebook.stem[:LONGEST_TITLE],
            **{name: sent[name] for name in ("options", "preemptible", "requeue")},
            "parameters": changed(parameters(notebook), sent["parameters"]),
            "directory": in_workspace(notebook.parent, "the notebook"),
            "key": key,
        }
        # After an attempt without an answer the run may be there, and need that copy.
        copy = self._copied.pop(key, "") or snapshot(notebook, body["title"])
        try:
            run = submit_copy(body, copy)
        except NoAnswer:
            self._copied[key] = copy
            raise
        return {"id": run["id"], "folder": run["folder"], "open": self._path(run["folder"])}

    def _notebook(self, path):
        found = Path(self._root, path)
        in_workspace(found, "the notebook")
        if not self._root or not found.is_file():
            raise Refused(f"there is no file {path}: save the notebook first")
        return found

    def _path(self, folder):
        """Return a folder of the workspace as the file browser names it; empty if it cannot."""
        try:
            return (workspace() / folder).relative_to(Path(self._root).resolve()).as_posix()
        except ValueError:
            return ""


def parameters(notebook):
    """Return what the cell tagged "parameters" assigns, where that is a value without a line break.

    Empty if there is none, or if it is not Python.
    """
    if notebook.stat().st_size > MOST_BYTES:
        return {}
    try:
        cells = json.loads(notebook.read_bytes())["cells"]
        tagged = (c for c in cells if "parameters" in c.get("metadata", {}).get("tags", ()))
        source = next(tagged, {}).get("source", "")
        lines = ast.parse(source if isinstance(source, str) else "".join(source)).body
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError):
        return {}
    found = {}
    for line in lines:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or value is None:
            continue
        with suppress(*NO_VALUE):
            given = plain(ast.literal_eval(value))
            if "\n" not in shown(given):
                found[targets[0].id] = given
    return found


def plain(value):
    """Return a value that JSON can express. Raises ValueError or TypeError for any other."""
    if json.loads(json.dumps(value, allow_nan=False)) != value:
        raise ValueError("JSON would change it")
    return value


def shown(value):
    """Return a value as a field shows it: a text without quotes."""
    return value if isinstance(value, str) else repr(value)


def changed(known, typed):
    """Return the parameters whose typed value differs from the notebook's."""
    found = {}
    for name, text in typed.items():
        if name not in known or text == shown(known[name]):
            continue
        found[name] = text if isinstance(known[name], str) else literal(name, text)
    return found


def literal(name, text):
    """Return a value as Python or JSON writes it."""
    for parse in (ast.literal_eval, json.loads):
        with suppress(*NO_VALUE):
            return plain(parse(text.strip()))
    raise Refused(
        f"the parameter {name} is {text!r}: write a number or another value, a text in quotes"
    )


def sentence(error):
    """Return what was refused as a sentence."""
    text = str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


class FinishHandler(APIHandler):
    """Answers the dialog's requests; an error is a sentence that says why there is no answer."""

    auth_resource = "gpuspawner"

    def initialize(self, notebooks):
        self.notebooks = notebooks

    @web.authenticated
    @authorized
    async def post(self, what):
        work = partial(getattr(self.notebooks, what), self.get_json_body())
        try:
            told = await IOLoop.current().run_in_executor(None, work)
        except Refused as error:
            told = {"message": sentence(error)}
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(told))


def _jupyter_server_extension_points():
    return [{"module": "gpuspawner_finish"}]


def _load_jupyter_server_extension(app):
    if not all(os.environ.get(name) for name in NEEDED):
        return
    settings = app.web_app.settings
    # Tells the browser's part that runs are possible here.
    settings.setdefault("page_config_data", {})["gpuspawnerRuns"] = "on"
    notebooks = Notebooks(getattr(app.contents_manager, "root_dir", ""))
    path = url_path_join(settings["base_url"], "gpuspawner", "runs", "(quote|submit)")
    app.web_app.add_handlers(".*$", [(path, FinishHandler, {"notebooks": notebooks})])
