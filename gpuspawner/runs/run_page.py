"""The page of one run: its progress, log, output and files, and the form that runs it again."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest
from ..web.base import ServiceHandler
from ..web.pages import FormPage
from .file_views import files_of, own_run
from .files import OUTPUT, FilePart
from .models import FollowedRun, RunRecord, RunState
from .notebook_html import LARGEST, NotRendered, render
from .repetition import Repetition
from .views import COLOURS, run_figures, submit

SHOWN_LOG_BYTES = 256 * 1024
"""How much of the end of a log a page shows."""

COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Sequences that move a terminal's cursor or colour its text, and other control characters."""

FRAMED = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'self'"
)
"""The content security policy of a notebook: nothing in it runs, and it has no origin."""


class RunPage(FormPage):
    """The page of one run."""

    has_frame = True

    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Send the page."""
        await self.show_run(await own_run(self, run_id))

    async def show_run(
        self,
        followed: FollowedRun,
        typed: Repetition | None = None,
        refusal: GPUSpawnerError | None = None,
    ) -> None:
        """Send the page; ``refusal`` is why the run that was ``typed`` was not submitted."""
        run = followed.run
        record, log, trouble = RunRecord(), FilePart(b"", 0, 0), ""
        if followed.lease is not None:
            try:
                files = files_of(self)
                record = await files.call(files.record, followed)
                log = await files.call(files.log, followed, -SHOWN_LOG_BYTES, SHOWN_LOG_BYTES)
            except GPUSpawnerError as error:
                trouble = error.message
        [figures] = await self.read(run_figures, self.services, [followed])
        options = run.options
        self.show(
            "run.html",
            refusal=refusal,
            some=figures,
            run=run,
            lease=followed.lease,
            state=followed.state.value,
            ended=bool(run.outcome),
            stops=bool(followed.lease and followed.lease.outcome and not run.outcome),
            progress=record.cell if followed.state is RunState.RUNNING else None,
            record=record,
            has_output=OUTPUT in record.files and bool(run.work.notebook),
            log=readable(log.data),
            log_end=log.end,
            is_cut=log.start > 0,
            trouble=trouble,
            form_of_run=Repetition.of_run(run),
            environment=(followed.lease and followed.lease.environment)
            or options.get("environment"),
            form=typed or Repetition.of_run(run),
            mine=run.user == self.user,
            words=COLOURS,
            now=self.services.clock(),
            xsrf=self.xsrf,
        )


class RunAgainPage(RunPage):
    """The form that submits a run like another one, after a confirmation."""

    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Redirect to the run: the user had to sign in again to send the form."""
        self.redirect(f"{self.context.prefix}runs/{run_id}")

    @web.authenticated
    async def post(self, run_id: str) -> None:
        """Ask for confirmation, or submit the run."""
        followed = await own_run(self, run_id)
        run = followed.run
        if run.user != self.user:
            raise web.HTTPError(403)
        typed = Repetition.typed(self.field)
        try:
            sent = typed.body(followed, self.key)
            if self.confirmed:
                self.go(f"runs/{await submit(self, sent, again=True)}")
                return
        except GPUSpawnerError as error:
            await self.show_run(followed, typed, error)
            return
        what = " ".join(sent.command) or sent.notebook
        self.confirm(
            "run_again",
            fields=typed.as_fields(),
            action=f"runs/{run_id}/again",
            back=f"runs/{run_id}",
            what=what,
            sent=sent,
            parameters=typed.parameters,
        )


class RunOutputPage(ServiceHandler):
    """A run's output notebook, for a frame that is isolated from the hub."""

    def set_default_headers(self) -> None:
        """Set the headers of content that a member wrote."""
        super().set_default_headers()
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Content-Security-Policy", FRAMED)

    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Send the notebook as HTML."""
        followed = await own_run(self, run_id)
        try:
            files = files_of(self)
            read = partial(files.part, followed, OUTPUT, 0, LARGEST, largest=LARGEST)
            notebook = (await files.call(read)).data
            html = await render(notebook)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
        except NotRendered:
            sentence = f"{OUTPUT} cannot be shown as a notebook. Download it to look at it."
            raise web.HTTPError(409) from InvalidRequest(sentence)
        self.finish(html)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send the error as plain text."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self.sentence(status_code, **kwargs)[1])


def readable(printed: bytes) -> str:
    """Return printed bytes as the text that a terminal would finally show."""
    lines = COLOUR.sub("", printed.decode(errors="replace")).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)  # progress bars


HANDLERS = [
    (r"runs/([0-9a-z-]{1,64})", RunPage),
    (r"runs/([0-9a-z-]{1,64})/again", RunAgainPage),
    (r"runs/([0-9a-z-]{1,64})/output", RunOutputPage),
]
