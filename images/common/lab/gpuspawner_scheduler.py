"""jupyter-scheduler's jobs as runs, and its job definitions as schedules of runs.

JupyterLab's part of jupyter-scheduler asks this server, which asks the hub with its own token, as
the command `gpuspawner-run` does. So a job has a lease, a price and a place in the queue, and
scheduled runs start even if the member has no server. It needs jupyter-scheduler 2.12 or later.
"""

import asyncio
import json
import os
import uuid
from contextlib import suppress
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from urllib.parse import quote

from gpuspawner_run import (
    NoAnswer,
    Refused,
    ask,
    in_workspace,
    parsed,
    snapshot,
    submit_copy,
    workspace,
)
from jupyter_scheduler.environments import EnvironmentManager, EnvironmentRetrievalError
from jupyter_scheduler.exceptions import InputUriError, SchedulerError
from jupyter_scheduler.executors import ExecutionManager
from jupyter_scheduler.models import (
    DescribeJob,
    DescribeJobDefinition,
    JobFeature,
    JobFile,
    ListJobDefinitionsResponse,
    ListJobsResponse,
    RuntimeEnvironment,
    SortDirection,
    Status,
)
from jupyter_scheduler.scheduler import BaseScheduler
from traitlets import Type

SCHEDULES = "runs/-/schedules"
PAGE = 500
"""Runs per request."""
MOST_RUNS = 2000
"""How many of the newest runs are searched for jobs."""
REMOVED = ".removed-from-jobs"
"""A file in a run's folder that marks the run as removed from the list of jobs."""
FORMATS = {"ipynb": "Notebook"}

STATUS = {
    "waiting": Status.QUEUED,
    "starting": Status.IN_PROGRESS,
    "running": Status.IN_PROGRESS,
    "done": Status.COMPLETED,
    "failed": Status.FAILED,
    "stopped": Status.STOPPED,
}
FEATURES = (
    JobFeature.job_name,
    JobFeature.parameters,
    JobFeature.output_formats,
    JobFeature.job_definition,
    JobFeature.idempotency_token,
    JobFeature.stop_job,
    JobFeature.delete_job,
)


def in_thread(error_class):
    """Run a method in a thread, and raise the hub's refusals as errors of this class."""

    def decorate(method):
        @wraps(method)
        async def called(*args, **kwargs):
            work = partial(method, *args, **kwargs)
            try:
                return await asyncio.get_running_loop().run_in_executor(None, work)
            except Refused as error:
                raise error_class(sentence(error)) from error

        return called

    return decorate


def sentence(error):
    """Return the text of a refusal as a sentence."""
    text = str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


refusing = in_thread(SchedulerError)


class CatalogEnvironments(EnvironmentManager):
    """The environments that the hub's catalog has for this member."""

    @in_thread(EnvironmentRetrievalError)
    def list_environments(self):
        """Return them, the one of this session first."""
        found = ask("GET", "", of="environments")["environments"]
        here = os.environ.get("GPUSPAWNER_ENVIRONMENT", "")
        found.sort(key=lambda each: (each["environment"] != here, not each["default"]))
        return [_environment(each) for each in found]

    def manage_environments_command(self):
        """Return no command: an admin changes the catalog."""
        return ""

    def output_formats_mapping(self):
        """Return the names of the formats of outputs."""
        return FORMATS


class RunFeatures(ExecutionManager):
    """The features of jobs that JupyterLab offers. The hub executes the jobs."""

    def execute(self):
        """Raise an error: nothing is executed here."""
        raise SchedulerError("The hub executes jobs, not this server.")

    def supported_features(cls):  # jupyter-scheduler hands the class over itself
        """Return which features jobs have."""
        return {feature: feature in FEATURES for feature in JobFeature}


class RunScheduler(BaseScheduler):
    """Jobs that are runs of the hub, and job definitions that are its schedules."""

    task_runner = None
    """None, because the hub starts scheduled runs."""

    execution_manager_class = Type(
        klass="jupyter_scheduler.executors.ExecutionManager",
        default_value="gpuspawner_scheduler.RunFeatures",
        config=True,
        help="The class that says which features jobs have.",
    )

    def __init__(self, root_dir, environments_manager, config=None, db_url="", **kwargs):
        """Create it; the database of jupyter-scheduler stays empty."""
        super().__init__(root_dir, environments_manager, config=config, **kwargs)

    # Jobs.

    @refusing
    def create_job(self, model):
        """Submit a run of a copy of the notebook, and return its id."""
        _require_supported(model)
        body = self._body(model)
        body["key"] = model.idempotency_token or uuid.uuid4().hex
        copy = snapshot(self._notebook(model), model.name)
        return submit_copy(body, copy)["id"]

    def update_job(self, job_id, model):
        """Raise an error: a submitted run cannot be changed."""
        raise SchedulerError("A job cannot be changed after it was submitted: stop it instead.")

    @refusing
    def list_jobs(self, query):
        """Return the runs of notebooks that the query asks for."""
        jobs = [self._job(run) for run in self._runs(query.job_definition_id)]
        if query.tags:
            jobs = []
        if query.status:
            jobs = [job for job in jobs if job.status == query.status]
        if query.name:
            jobs = [job for job in jobs if job.name.startswith(query.name)]
        if query.start_time:
            jobs = [job for job in jobs if (job.start_time or 0) >= query.start_time]
        part, following = _page(jobs, query)
        return ListJobsResponse(jobs=part, total_count=len(jobs), next_token=following)

    @refusing
    def count_jobs(self, query):
        """Return how many jobs have a status."""
        return sum(STATUS[run["state"]] == query.status for run in self._runs())

    @refusing
    def get_job(self, job_id, job_files=True):
        """Return one job."""
        return self._job(ask("GET", f"/{quote(job_id, safe='')}"), job_files)

    @refusing
    def stop_job(self, job_id):
        """Stop the run."""
        ask("DELETE", f"/{quote(job_id, safe='')}")

    @refusing
    def delete_job(self, job_id):
        """Stop the run and remove it from the jobs; its files and its receipt stay."""
        run = ask("DELETE", f"/{quote(job_id, safe='')}")
        self._remove(run)

    # Job definitions.

    @refusing
    def create_job_definition(self, model):
        """Create a schedule of a copy of the notebook, and return its id."""
        _require_supported(model)
        if not model.schedule:
            raise Refused("a job definition needs a schedule: choose when it is to run")
        copy = snapshot(self._notebook(model), model.name, "runs/schedules")
        body = {
            **self._body(model),
            "notebook": copy,
            "cron": model.schedule,
            "zone": model.timezone or "UTC",
            "key": uuid.uuid4().hex,
        }
        try:
            return ask("POST", "", body, SCHEDULES)["id"]
        except NoAnswer:
            raise  # the schedule may exist and need its copy
        except Refused:
            with suppress(OSError):
                (workspace() / copy).unlink()
                (workspace() / copy).parent.rmdir()
            raise

    @refusing
    def update_job_definition(self, job_definition_id, model):
        """Change a schedule; a new notebook replaces its copy."""
        if model.tags:
            raise Refused("a job definition has no tags here: leave them out")
        schedule = _schedule(job_definition_id)
        sent = {"title": model.name, "cron": model.schedule, "zone": model.timezone}
        if model.parameters is not None:
            sent["parameters"] = _values(model.parameters)
        if model.active is not None:
            sent["paused"] = not model.active
        if model.compute_type or model.runtime_environment_name:
            environment = model.runtime_environment_name or schedule["options"].get("environment")
            sent["options"] = {**schedule["options"], "environment": environment}
            if model.compute_type:
                sent["options"]["gpus"] = _gpus(model.compute_type)
        if model.input_uri:
            _replace(workspace() / schedule["notebook"], self._notebook(model).read_bytes())
        changes = {name: value for name, value in sent.items() if value is not None}
        ask("PATCH", f"/{quote(job_definition_id, safe='')}", changes, SCHEDULES)

    @refusing
    def delete_job_definition(self, job_definition_id):
        """Delete the schedule; its runs stay."""
        ask("DELETE", f"/{quote(job_definition_id, safe='')}", of=SCHEDULES)

    @refusing
    def get_job_definition(self, job_definition_id):
        """Return one job definition."""
        return _definition(_schedule(job_definition_id))

    @refusing
    def list_job_definitions(self, query):
        """Return the schedules of notebooks that the query asks for."""
        found = ask("GET", "", of=SCHEDULES)["schedules"]
        definitions = [_definition(each) for each in found if each["notebook"]]
        if query.tags:
            definitions = []
        if query.name:
            definitions = [x for x in definitions if x.name.startswith(query.name)]
        if query.create_time:
            definitions = [x for x in definitions if x.create_time >= query.create_time]
        part, following = _page(definitions, query)
        return ListJobDefinitionsResponse(
            job_definitions=part, total_count=len(definitions), next_token=following
        )

    @refusing
    def create_job_from_definition(self, job_definition_id, model):
        """Submit a run of a schedule at once, and return its id."""
        key, path = uuid.uuid4().hex, f"/{quote(job_definition_id, safe='')}"
        parameters = None if model.parameters is None else _values(model.parameters)
        schedule = _schedule(job_definition_id)
        if parameters is None or parameters == schedule["parameters"]:
            return ask("POST", f"{path}/run", {"key": key}, SCHEDULES)["id"]
        names = ("title", "notebook", "directory", "options", "requeue", "preemptible")
        body = {name: schedule[name] for name in names}
        return ask("POST", "", {**body, "parameters": parameters, "key": key})["id"]

    # Files.

    def get_staging_paths(self, model):
        """Return where the files of a job are: in the workspace, which needs no download."""
        if not isinstance(model, DescribeJob):
            return {}
        found = {file.file_format: file.file_path for file in model.job_files}
        return {
            kind: str(Path(self.root_dir, path)) if path else "" for kind, path in found.items()
        }

    def _body(self, model):
        notebook = self._notebook(model)
        environment = getattr(model, "runtime_environment_name", "")
        options = {"environment": environment} if environment else {}
        if model.compute_type:
            options["gpus"] = _gpus(model.compute_type)
        for name, value in (model.runtime_environment_parameters or {}).items():
            options[name] = value
        return {
            "title": model.name,
            "parameters": _values(model.parameters or {}),
            "directory": in_workspace(notebook.parent, "the notebook"),
            "options": options,
        }

    def _notebook(self, model):
        if not self.file_exists(model.input_uri):
            raise InputUriError(model.input_uri)
        return Path(self.root_dir, model.input_uri)

    def _runs(self, schedule=None):
        """Return the runs of notebooks that are jobs, newest first: all, or those of a schedule."""
        ids = None
        if schedule is not None:
            ids = {time["run"] for time in _schedule(schedule)["times"]}
        found, before = [], ""
        while len(found) < MOST_RUNS:
            page = ask("GET", f"?limit={PAGE}" + (f"&before={before}" if before else ""))
            found += page["runs"]
            before = page["next"]
            if before is None:
                break
        return [
            run
            for run in found
            if run["notebook"]
            and (ids is None or run["id"] in ids)
            and not (workspace() / run["folder"] / REMOVED).exists()
        ]

    def _job(self, run, job_files=True):
        started, ended = _milliseconds(run["started_at"]), _milliseconds(run["ended_at"])
        created = _milliseconds(run["created_at"])
        job = DescribeJob(
            input_filename=Path(run["notebook"]).name,
            runtime_environment_name=run["options"].get("environment") or "",
            compute_type=_compute_type(run["options"]),
            output_formats=list(FORMATS),
            parameters={name: _text(value) for name, value in run["parameters"].items()},
            name=run["title"],
            job_id=run["id"],
            url=f"/jobs/{run['id']}",
            create_time=created,
            update_time=ended or started or created,
            start_time=started,
            end_time=ended,
            status=STATUS[run["state"]],
            status_message=run["reason"] or None,
        )
        files = (("Notebook", "ipynb", "output.ipynb"), ("Input", "input", "input.ipynb"))
        job.job_files = [
            JobFile(
                display_name=name,
                file_format=kind,
                file_path=self._path(workspace() / run["folder"] / file),
            )
            for name, kind, file in files
        ]
        job.downloaded = job.job_files[0].file_path is not None
        return job

    def _path(self, file):
        """Return a file as the file browser names it; None if it is not there or cannot be seen."""
        if not file.is_file():
            return None
        try:
            return file.relative_to(Path(self.root_dir).resolve()).as_posix()
        except ValueError:
            return None

    def _remove(self, run):
        folder = workspace() / run["folder"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REMOVED).touch()
        except OSError as error:
            raise Refused(f"{folder} cannot be written: {error.strerror}") from None


def _environment(found):
    counts = range(0 if found["cpu_variant"] else 1, found["max_gpus"] + 1)
    return RuntimeEnvironment(
        name=found["environment"],
        # JupyterLab's part shows the name and sends the label: they have to be the same.
        label=found["environment"],
        description=": ".join(filter(None, (found["name"], found["summary"]))),
        file_extensions=["ipynb"],
        output_formats=list(FORMATS),
        metadata={},
        compute_types=[_words(count) for count in counts],
        default_compute_type=_words(found["default_gpus"]),
        utc_only=False,
    )


def _words(gpus):
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _gpus(compute_type):
    return int(compute_type.split()[0])


def _compute_type(options):
    gpus = options.get("gpus")
    return None if gpus is None else _words(gpus)


def _require_supported(model):
    if model.tags:
        raise Refused("a job has no tags here: leave them out")
    others = set(model.output_formats or FORMATS) - set(FORMATS)
    if others:
        raise Refused(f"the output is a notebook: leave out {', '.join(sorted(others))}")


def _values(parameters):
    return {name: parsed(value) for name, value in parameters.items()}


def _text(value):
    """Return the text that `parsed` reads as this value."""
    return value if isinstance(value, str) and parsed(value) == value else json.dumps(value)


def _milliseconds(moment):
    if moment is None:
        return None
    return int(datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp() * 1000)


def _schedule(schedule_id):
    return ask("GET", f"/{quote(schedule_id, safe='')}", of=SCHEDULES)


def _definition(schedule):
    created = _milliseconds(schedule["created_at"])
    return DescribeJobDefinition(
        input_filename=Path(schedule["notebook"]).name,
        runtime_environment_name=schedule["options"].get("environment") or "",
        compute_type=_compute_type(schedule["options"]),
        output_formats=list(FORMATS),
        parameters={name: _text(value) for name, value in schedule["parameters"].items()},
        name=schedule["title"],
        schedule=schedule["cron"],
        timezone=schedule["zone"],
        job_definition_id=schedule["id"],
        create_time=created,
        update_time=created,
        active=not schedule["paused"],
    )


def _page(found, query):
    """Return the requested page of a list, sorted, and the token of the next page."""
    for field in reversed(query.sort_by or []):
        found.sort(
            key=lambda each, name=field.name: (
                getattr(each, name, None) or 0
                if name.endswith("_time")
                else str(getattr(each, name, None) or "")
            ),
            reverse=field.direction is SortDirection.desc,
        )
    start = int(query.next_token or 0)
    end = start + int(query.max_items)
    return found[start:end], str(end) if end < len(found) else None


def _replace(file, content):
    new = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        new.write_bytes(content)
        new.replace(file)
    except OSError as error:
        raise Refused(f"{file} cannot be written: {error.strerror}") from None
