"""Domain errors. Each one's text is a sentence that a member or an admin can act on.

A class's docstring is its default message; fields in braces are filled from keyword arguments.
``reason`` is a short, stable label for JupyterHub's ``SpawnException`` and JSON; ``status_code`` is
the HTTP status that a page or the REST API answers with.
"""

from __future__ import annotations

import inspect
from typing import Any


class GPUSpawnerError(Exception):
    """Something went wrong. Try again in a moment, and tell your admin if it persists."""

    reason = "error"
    status_code = 500

    def __init__(self, message: str = "", **fields: Any) -> None:
        self.fields = fields
        written = inspect.cleandoc(type(self).__doc__ or "").replace("\n", " ")
        text = message or written.format(**fields)
        super().__init__(text)

    @property
    def message(self) -> str:
        """The sentence, as shown to people."""
        return str(self.args[0])


# What a member asked for cannot be had: nothing is broken.


class Refused(GPUSpawnerError):
    """This server cannot be started as asked."""

    reason = "refused"
    status_code = 400
    ways_on: tuple[str, ...] = ()
    """What the member can do instead: ``queue`` or ``cpu``, to start without a GPU."""


class NoDeviceFree(Refused):
    """All GPUs are in use. Start without a GPU, or try again."""

    reason = "no_device_free"
    status_code = 409
    ways_on: tuple[str, ...] = ("queue", "cpu")


class HostFull(NoDeviceFree):
    """This server needs {lacking}. Wait in the queue, or try again when others have stopped
    theirs."""

    reason = "host_full"
    ways_on = ("queue",)


class TooMuchAsked(Refused):
    """The request exceeds what this hub has or allows."""

    reason = "limit"


class NoCredits(Refused):
    """Your balance does not cover a GPU. You can still start without one."""

    reason = "no_credits"
    status_code = 402
    ways_on = ("cpu",)


class InvalidRequest(Refused):
    """The field {field!r} is not valid."""

    reason = "invalid_request"


class RequestTooLarge(Refused):
    """The request is larger than {limit}. Send less at once: split a large sweep, and have the
    program read long values from a file in your workspace."""

    reason = "request_too_large"
    status_code = 413


class NotAllowed(Refused):
    """You may not use {what}."""

    reason = "not_allowed"
    status_code = 403


class ServerHasLease(Refused):
    """This server already has GPUs. Stop it first, then start it again."""

    reason = "already_leased"
    status_code = 409


class ServerWaits(Refused):
    """This server is already in the queue. Open its page, or stop it first."""

    reason = "already_waiting"
    status_code = 409


class TicketEnded(Refused):
    """You lost your place in the queue: {why}. Start the server again to get a new one."""

    reason = "ticket_ended"
    status_code = 409


class MemberGone(TicketEnded):
    """You lost your place in the queue: {why}. Start the server again to get a new one."""

    reason = "member_gone"


class MembershipEnded(Refused):
    """Your membership has ended: {why}. Your files and credits are kept; ask your admin."""

    reason = "membership_ended"
    status_code = 403


class TooManyTickets(Refused):
    """You already have {count} tickets in the queue; the maximum is {most}. Cancel one first."""

    reason = "limit"


class TooManyRuns(Refused):
    """You already have {count} runs that wait or run; the maximum is {most}. Stop one first."""

    reason = "limit"


class SweepTooLarge(Refused):
    """The sweep has {runs} runs, and {count} of yours wait or run; the maximum is {most}. Make it
    smaller, or stop others first."""

    reason = "limit"


class UnknownSweep(Refused):
    """There is no sweep {sweep!r}."""

    reason = "unknown_sweep"
    status_code = 404


class UnknownSchedule(Refused):
    """There is no schedule {schedule!r}."""

    reason = "unknown_schedule"
    status_code = 404


class TooManySchedules(Refused):
    """You already have {count} schedules; the maximum is {most}. Delete one first."""

    reason = "limit"


class NothingFailed(Refused):
    """No run of this sweep has failed: there is nothing to submit again."""

    reason = "nothing_failed"
    status_code = 409


class NoRuns(Refused):
    """This hub runs no notebooks or commands without a session."""

    reason = "no_runs"
    status_code = 409


class CannotExtend(Refused):
    """The session cannot be extended: {why}."""

    reason = "cannot_extend"
    status_code = 409


class CannotDrain(Refused):
    """The GPU was not drained: waiting members could start later than they were told."""

    reason = "cannot_drain"
    status_code = 409


class CannotSnooze(Refused):
    """The stop cannot be postponed: {why}."""

    reason = "cannot_snooze"
    status_code = 409


class CannotRestart(Refused):
    """The server cannot be restarted with its GPUs: {why}."""

    reason = "cannot_restart"
    status_code = 409


class CannotStop(Refused):
    """The server cannot be stopped: {why}."""

    reason = "cannot_stop"
    status_code = 409


class WorkspaceFull(Refused):
    """Your files use {used} of {limit}. To free space, start without a GPU and delete files."""

    reason = "workspace_full"
    status_code = 507
    ways_on = ("cpu",)


class WorkspaceBusy(Refused):
    """Your files are not available right now: {what}. Try again later, or ask your admin."""

    reason = "workspace_busy"
    status_code = 409


class UnknownWorkspace(Refused):
    """There is no workspace {name!r}: `gpuspawner workspaces` lists them."""

    reason = "unknown_workspace"
    status_code = 404


class ArchiveRefused(GPUSpawnerError):
    """The workspace was not archived or restored: {what}."""

    reason = "archive"

    def __init__(self, what: str, said: object = "") -> None:
        super().__init__(what=what)
        self.what = what
        self.said = str(said)
        """The words of the system, the engine or a program, for logs and commands."""


class ArchiveCancelled(Refused):
    """The archive of {source} was cancelled. No archive was made; the workspace is unchanged."""

    reason = "archive_cancelled"
    status_code = 409


class UnknownArchive(Refused):
    """There is no archive {name!r} in the hub's folder of archives."""

    reason = "unknown_archive"
    status_code = 404


class UnknownFolder(Refused):
    """There is no shared folder {folder!r} that you may use."""

    reason = "unknown_folder"
    status_code = 404


class FolderRefused(Refused):
    """The shared folder was not changed: {why}."""

    reason = "folder"
    status_code = 409


class GrantingPaused(Refused):
    """New GPU sessions are paused: {why}. You can start without a GPU."""

    reason = "paused"
    status_code = 409
    ways_on = ("queue", "cpu")


# Something that the hub depends on is not responding.


class Unavailable(GPUSpawnerError):
    """A part of the hub is not responding. Try again in a moment."""

    reason = "unavailable"
    status_code = 503


class StoreUnavailable(Unavailable):
    """Database unavailable. No changes were made. Try again in a moment."""

    reason = "store_unavailable"


class ClockWasSet(Unavailable):
    """The server's clock was just changed. No changes were made. Try again."""

    reason = "clock_was_set"


class EngineUnavailable(Unavailable):
    """The container engine is not responding. Try again in a moment; nothing was charged."""

    reason = "engine_unavailable"


class AnotherEngine(EngineUnavailable):
    """Your last server was started on another container engine and may still run there. Tell your
    admin."""

    reason = "another_engine"


class SlurmUnavailable(Unavailable):
    """Slurm is not responding: {why}. Running sessions continue. Try again in a moment."""

    reason = "slurm_unavailable"


class SlurmRefused(Refused):
    """Slurm rejected the request: {why}."""

    reason = "slurm_refused"


class ImageUnavailable(Unavailable):
    """The image {image} could not be pulled: {why}. {remedy}"""

    reason = "image"


class ImageAwaited(Unavailable):
    """The image is not available yet: {why}."""

    reason = "image_awaited"


class NotReconciled(Unavailable):
    """The hub is still checking which GPUs are in use. Try again in a moment."""

    reason = "not_reconciled"


class AnotherHubGrants(Unavailable):
    """Another hub is using this database, and only one hub can grant GPUs from it.
    Servers cannot start here until your admin has resolved this."""

    reason = "another_hub"


class NotTheOwner(AnotherHubGrants):
    """The servers in this hub's database belong to another hub, which ran on {machine}.
    Nothing starts here until an admin decides which hub takes them over."""

    reason = "not_the_owner"


class QuotaUnavailable(Unavailable):
    """A quota for {path} cannot be enforced: {why}."""

    reason = "quota_unavailable"


class StartFailed(GPUSpawnerError):
    """Your server did not start: {cause}. Nothing was charged."""

    reason = "start_failed"


class RunStartFailed(StartFailed):
    """The run did not start: {cause}. Nothing was charged."""


# Admins' mistakes and the ledger's guards.


class ConfigError(GPUSpawnerError):
    """The configuration is not valid: {what}."""

    reason = "config"


class SlugRefused(ConfigError):
    """The new environment cannot have this name."""

    reason = "slug"
    status_code = 409


class InvalidSlug(SlugRefused):
    """This is not a valid name for an environment."""

    status_code = 400


class UpdateRefused(Refused):
    """The image was not updated."""

    reason = "image_update"
    status_code = 409


class NothingToUpdate(Refused):
    """This hub has no catalog of images that could be updated."""

    reason = "no_images"
    status_code = 404


class UnknownEnvironment(Refused):
    """There is no environment {environment!r} in the catalog."""

    reason = "unknown_environment"
    status_code = 404


class RefusedByHub(GPUSpawnerError):
    """The Hub refused a request. Message, reason and status are the Hub's."""

    def __init__(self, message: str, reason: str, status_code: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.status_code = status_code


class BackupRefused(GPUSpawnerError):
    """The database was not backed up or restored: {what}."""

    reason = "backup"


class UnknownAccount(Refused):
    """There is no account named {account!r}."""

    reason = "unknown_account"
    status_code = 404


class UnknownLease(Refused):
    """There is no lease {lease!r}."""

    reason = "unknown_lease"
    status_code = 404


class UnknownTicket(Refused):
    """There is no ticket {ticket!r}."""

    reason = "unknown_ticket"
    status_code = 404


class UnknownRun(Refused):
    """There is no run {run!r}."""

    reason = "unknown_run"
    status_code = 404


class NoRunFiles(Refused):
    """The files of this run cannot be shown: {why}."""

    reason = "no_files"
    status_code = 404


class NoRunFile(Refused):
    """There is no file {path!r} in the folder of this run."""

    reason = "no_file"
    status_code = 404


class TooManyStreams(Refused):
    """You already follow or download {most} files of runs. Wait until one has ended."""

    reason = "limit"
    status_code = 429


class UnknownTransfer(Refused):
    """There is no transfer {transfer!r}."""

    reason = "unknown_transfer"
    status_code = 404


class UnknownRefill(Refused):
    """There is no refill {refill!r}: `gpuspawner refills` lists them."""

    reason = "unknown_refill"
    status_code = 404


class UnknownRate(Refused):
    """There is no rate {rate!r}: `gpuspawner rates` lists them."""

    reason = "unknown_rate"
    status_code = 404


class TooManyViewers(Refused):
    """Too many live pages are open. Close some, or reload this page for newer figures."""

    reason = "too_many_viewers"
    status_code = 429


class LedgerError(GPUSpawnerError):
    """The ledger refused an entry: {what}."""

    reason = "ledger"
