"""For each door of the service a request that is right, made by whoever may: only what then works
for them is an attack when somebody else sends it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import requests

from gpuspawner.leases.models import LeaseState, ServerRef
from gpuspawner.storage.service import ARCHIVING
from tests.support.attack_hub import OWNER, AttackHub, Door
from tests.support.hub import ADMIN
from tests.support.processes import wait_for

FRIEND = "oskar"
"""With whom Olga shares folders: the requests are about things of hers."""

LINE = "waits"
"""Her server that waits in the queue."""

WHY = "a reason"
YES = {"confirm": "yes", "reason": WHY}

Sent = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Right:
    """What is right for one door: who may do it, with what, and after what."""

    by: str
    sent: Sent = None
    first: str = ""
    """What of a folder has to be so: ``invited``, ``member`` or ``deleted``."""
    then: tuple[str, dict[str, Any]] | None = None
    """What an admin sends afterwards, so that all is as before."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is ready to be sent, by anybody."""

    name: str
    door: Door
    path: str
    by: str
    sent: Sent
    then: tuple[str, dict[str, Any]] | None = None
    hers: tuple[str, ...] = ()
    """Words that nobody else may read."""

    @property
    def method(self) -> str:
        """``GET``, ``POST``, ``PUT``, ``PATCH`` or ``DELETE``."""
        return self.door.method

    @property
    def scripted(self) -> bool:
        """Whether it is for scripts, and takes JSON."""
        return self.path.startswith("api/")

    @property
    def body(self) -> dict[str, Any]:
        """What is sent, as :mod:`requests` takes it."""
        if self.sent is None:
            return {}
        return {"json": dict(self.sent)} if self.scripted else {"data": dict(self.sent)}

    def __str__(self) -> str:
        return str(self.door)


RESUME = ("api/granting", {"paused": False, "reason": WHY})
UNDRAIN = ("api/devices/{device}/undrain", {"reason": WHY})
REFILL = {"rule": "FREQ=YEARLY", "from": "2999-01-01T00:00:00Z"}
REFILL |= {"amount": "5", "reason": WHY, "key": "{new}"}
"""None is given while the tests run: that would change accounts."""
_FAR = date.today() + timedelta(days=180)
FORM_REFILL = {**REFILL, "rule": f"FREQ=YEARLY;BYMONTH={_FAR.month};BYMONTHDAY={_FAR.day}"}
"""The same by the form, which asks for no beginning: its rules begin at the next full minute."""
RESTORED = {"archive": "{archive}", "workspace": "{workspace}"}
SMALL = {"environment": "small", "gpus": 0}
SWEEP = {"command": ["true"], "sets": [{}], "options": SMALL}
SCHEDULE = {"command": ["true"], "cron": "0 0 29 2 *", "options": SMALL, "paused": True}
"""None of its runs is submitted while the tests run."""
FOLDER = {"confirm": "yes", "member": FRIEND}

NAMED = ("lease", "ticket", "folder", "run", "sweep", "schedule")
"""What of Olga's an answer must not name to others."""

RIGHT = {
    "POST notices": Right(OWNER, {}),
    "POST notices/test": Right(OWNER, {}),
    "POST api/notices/test": Right(OWNER),
    "POST leases/{lease}/snooze": Right(OWNER, {}),
    "POST api/leases/{lease}/snooze": Right(OWNER),
    "POST leases/{lease}/restart": Right(OWNER, YES),
    "POST api/leases/{lease}/restart": Right(OWNER),
    "PUT api/notices/choices": Right(OWNER, {}),
    "POST queue/granting": Right(ADMIN, {"paused": "yes", "reason": WHY}, then=RESUME),
    "POST api/granting": Right(ADMIN, {"paused": True, "reason": WHY}, then=RESUME),
    "POST devices": Right(
        ADMIN, {**YES, "device": "{device}", "drained": "yes", "reason": WHY}, then=UNDRAIN
    ),
    "POST api/devices/{device}/drain": Right(ADMIN, {"anyway": True, "reason": WHY}, then=UNDRAIN),
    "POST api/devices/{device}/undrain": Right(ADMIN, {"reason": WHY}),
    "POST queue/{ticket}": Right(ADMIN, {"reason": WHY}),
    "POST queue/{ticket}/move": Right(ADMIN, {"position": "1", "reason": WHY}),
    "POST queue/{ticket}/boost": Right(ADMIN, {"points": "9", "reason": WHY}),
    "POST queue/{ticket}/cancel": Right(ADMIN, {"reason": WHY}),
    "POST tickets/{ticket}/cancel": Right(OWNER, YES),
    "POST api/runs": Right(OWNER, {"command": ["true"], "options": SMALL, "key": "two"}),
    "POST api/runs/-/quote": Right(OWNER, {"options": SMALL}),
    "DELETE api/runs/{run}": Right(OWNER),
    "POST runs/{run}/stop": Right(OWNER, YES),
    "POST runs/{run}/again": Right(OWNER, {**YES, "title": "again", "command": "true"}),
    "POST api/sweeps": Right(OWNER, {**SWEEP, "key": "three"}),
    "POST api/sweeps/-/quote": Right(OWNER, SWEEP),
    "POST api/sweeps/{sweep}/again": Right(OWNER, {}),
    "DELETE api/sweeps/{sweep}": Right(OWNER),
    "POST api/runs/-/schedules": Right(OWNER, {**SCHEDULE, "key": "{new}"}),
    "PATCH api/runs/-/schedules/{schedule}": Right(OWNER, {"title": "{new}"}),
    "DELETE api/runs/-/schedules/{schedule}": Right(OWNER),
    "POST api/runs/-/schedules/{schedule}/run": Right(OWNER, {"key": "{new}"}),
    "POST schedules/{schedule}/pause": Right(OWNER, {}),
    "POST schedules/{schedule}/resume": Right(OWNER, {}),
    "POST schedules/{schedule}/delete": Right(OWNER, YES),
    "POST runs/sweeps/{sweep}/again": Right(OWNER, YES),
    "POST runs/sweeps/{sweep}/stop": Right(OWNER, YES),
    "POST members": Right(ADMIN, {**YES, "lines": "name\n{new}"}),
    "POST members/{entry}/end": Right(ADMIN, YES),
    "POST api/catalog/small/update": Right(ADMIN, {"digest": f"sha256:{'0' * 64}"}),
    "POST workspaces/archive": Right(ADMIN, {**YES, "workspace": "{workspace}"}),
    "POST workspaces/restore": Right(ADMIN, {**YES, **RESTORED}),
    "POST workspaces/cancel": Right(ADMIN, {**YES, "workspace": "{workspace}"}),
    "POST workspaces/unlock": Right(ADMIN, {**YES, "workspace": "{workspace}"}),
    "POST api/workspaces/archive": Right(ADMIN, {"workspace": "{workspace}"}),
    "POST api/workspaces/restore": Right(ADMIN, RESTORED),
    "POST api/workspaces/cancel": Right(ADMIN, {"workspace": "{workspace}"}),
    "POST api/workspaces/unlock": Right(ADMIN, {"workspace": "{workspace}"}),
    "POST api/queue/{ticket}/move": Right(ADMIN, {"position": 1, "reason": WHY}),
    "POST api/queue/{ticket}/boost": Right(ADMIN, {"points": 9, "reason": WHY}),
    "POST api/queue/{ticket}/cancel": Right(OWNER, {"reason": WHY}),
    "POST leases/{lease}/stop": Right(OWNER, YES),
    "POST api/leases/{lease}/stop": Right(ADMIN, {"reason": WHY}),
    "POST api/leases/{lease}/end": Right(OWNER),
    "POST leases/{lease}/extend": Right(OWNER, {}),
    "POST api/leases/{lease}/extend": Right(OWNER),
    "POST leases/{lease}/refund": Right(ADMIN, {**YES, "amount": "0.000001", "key": "{new}"}),
    "POST api/leases/{lease}/refund": Right(
        ADMIN, {"amount": "0.000001", "reason": WHY, "key": "{new}"}
    ),
    "POST payer": Right(OWNER, {"account": f"member:{OWNER}"}),
    "POST accounts/{account}/grant": Right(ADMIN, {**YES, "amount": "5", "key": "{new}"}),
    "POST api/accounts/{account}/grants": Right(ADMIN, {"amount": "5", "reason": WHY}),
    "POST transfers/{transfer}": Right(ADMIN, YES),
    "POST api/transfers/{transfer}/reversal": Right(ADMIN, {"reason": WHY}),
    "POST bulk": Right(ADMIN, {**YES, "lines": f"{OWNER},5", "again": "yes"}),
    "POST api/grants": Right(ADMIN, {"csv": f"{OWNER},5", "reason": WHY, "again": True}),
    "POST rates": Right(ADMIN, {**YES, "rate": "9", "model": "T4", "since": "{day}"}),
    "POST api/rates": Right(
        ADMIN, {"rate": "9", "model": "T4", "from": "{day}T00:00:00Z", "reason": WHY}
    ),
    "POST rates/{rate}/remove": Right(ADMIN, YES),
    "POST api/rates/{rate}/remove": Right(ADMIN, {"reason": WHY}),
    "POST refills": Right(ADMIN, {**FORM_REFILL, "audience": "members:ml101", "confirm": "yes"}),
    "POST api/refills": Right(ADMIN, {**REFILL, "audience": ["members:ml101"]}),
    "POST refills/{refill}/end": Right(ADMIN, YES),
    "POST api/refills/{refill}/end": Right(ADMIN, {"reason": WHY}),
    "POST folders": Right(OWNER, {"name": "{new}"}),
    "POST api/folders": Right(OWNER, {"name": "{new}"}),
    "POST folders/{folder}/invite": Right(OWNER, {"member": FRIEND, "write": "yes"}),
    "POST folders/{folder}/accept": Right(FRIEND, {}, first="invited"),
    "POST folders/{folder}/leave": Right(FRIEND, FOLDER, first="member"),
    "POST folders/{folder}/uninvite": Right(OWNER, FOLDER, first="member"),
    "POST folders/{folder}/hand-on": Right(OWNER, FOLDER, first="member"),
    "POST folders/{folder}/delete": Right(OWNER, {"confirm": "yes", "name": "{name}"}),
    "POST folders/{folder}/restore": Right(ADMIN, {}, first="deleted"),
    "POST api/folders/{folder}/invite": Right(OWNER, {"member": FRIEND, "write": True}),
    "POST api/folders/{folder}/accept": Right(FRIEND, first="invited"),
    "POST api/folders/{folder}/leave": Right(FRIEND, first="member"),
    "POST api/folders/{folder}/uninvite": Right(OWNER, {"member": FRIEND}, first="member"),
    "POST api/folders/{folder}/hand-on": Right(OWNER, {"member": FRIEND}, first="member"),
    "POST api/folders/{folder}/delete": Right(OWNER, {"name": "{name}"}),
    "POST api/folders/{folder}/restore": Right(ADMIN, first="deleted"),
}

WITHOUT = {
    "POST notices/test": "she has no channel that could be tested",
    "POST api/notices/test": "she has no channel that could be tested",
    "POST leases/{lease}/snooze": "her server does not rest",
    "POST api/leases/{lease}/snooze": "her server does not rest",
    "POST leases/{lease}/restart": "her server did not lose its GPUs",
    "POST api/leases/{lease}/restart": "her server did not lose its GPUs",
    "POST api/catalog/small/update": "its image is from no registry",
}
"""Changes that nobody can make here, and why: what is tried there counts for nothing."""


class Requests:
    """Makes every request, with things of Olga's that are as the request needs them."""

    def __init__(self, hub: AttackHub) -> None:
        self.hub = hub
        self._numbers = itertools.count(1)
        self._worked: dict[tuple[str, bool], tuple[bool, bool]] = {}
        self._shown: dict[str, dict[str, str]] = {}
        """What is only read, and so has to be made once."""
        hub.browser_of(FRIEND)

    def calls(self, by: str = "") -> list[Callable[[], Call]]:
        """One for each door, each made ready when it is called; those that only read come first.

        ``by``: only changes, those that this user may make.
        """
        doors = {shape(self.hub, door): door for door in self.hub.doors()}
        changing = {name for name in doors if not name.startswith("GET ")}
        assert changing == RIGHT.keys(), changing ^ RIGHT.keys()
        wanted = [
            name for name in sorted(doors) if not by or (name in changing and by == _may(name))
        ]
        return [partial(self._call, name, doors[name]) for name in wanted]

    def assert_known(self, uncounted: Iterable[str]) -> None:
        """Whatever changes something was tried by who may, and worked: but for :data:`WITHOUT`."""
        for what in uncounted:
            method, path = what.split(" ")[:2]
            without = {name.rpartition("/")[2] for name in WITHOUT}
            known = method == "GET" or path.rpartition("/")[2] in without
            assert known, f"{what}: and who may do it could not either"

    def send(self, call: Call, user: str, *, by_token: bool) -> requests.Response:
        """As a script with the member's token, or as their browser from a page of ours: with
        cookies and the proof that they sent it."""
        hub = self.hub
        if by_token:
            return hub.service(call.method, call.path, user, **call.body)
        session = hub.browser_of(user)
        if not session.cookies.get("_xsrf", path="/services/gpu/"):
            hub.open_page(user, "/services/gpu/")
        proof = session.cookies.get("_xsrf", path="/services/gpu/")
        body = call.body
        if call.scripted:
            fetch = {"Sec-Fetch-Mode": "cors", "X-XSRFToken": str(proof)}
            return hub.browse(user, call.method, call.path, headers=fetch, **body)
        if "data" in body:
            body["data"]["_xsrf"] = proof
        return hub.browse(user, call.method, call.path, **body)

    def works(self, call: Call, tried: Iterable[requests.Response] = (), *, by_token: bool) -> bool:
        """Whether it works for who may, sent in this way: tried once for each door and way.

        What only reads works when it shows something of Olga's, or what none of those who
        ``tried`` it was shown. Afterwards all is as the next one needs it.
        """
        if (call.name, by_token) not in self._worked:
            self._worked[call.name, by_token] = self._try(call, by_token)
        done, tells = self._worked[call.name, by_token]
        if call.method == "GET":
            return done and (tells or all(each.status_code != 200 for each in tried))
        return done

    def _try(self, call: Call, by_token: bool) -> tuple[bool, bool]:
        """Whether it is done, and whether the answer tells something of Olga's."""
        answer = self.send(call, call.by, by_token=by_token)
        tells = any(word in answer.text for word in call.hers if word not in call.path)
        if call.method == "GET":
            return answer.status_code == 200, tells
        if call.then:
            self._admin(*call.then)
        if re.match("(api/)?(leases|queue|tickets)/", call.path):
            self._settle()
        if re.match("(api/)?workspaces/", call.path):
            wait_for(self._jobs_ended, "the end of what it began")
        if call.path.startswith(("api/runs", "api/sweeps")) or call.path.endswith("/again"):
            wait_for(self._runs_ended, "the end of what it began")
        return _changed(call, answer), tells

    # Below here: how.

    def _call(self, name: str, door: Door) -> Call:
        right = RIGHT.get(name, Right(ADMIN))
        values = {"new": f"new-{next(self._numbers)}", "account": f"member:{OWNER}"}
        values["day"] = self._new_day()
        values["device"] = self.hub.devices[0]
        if "POST workspaces/" in name or "POST api/workspaces/" in name:
            busy = ARCHIVING if name.endswith(("cancel", "unlock")) else ""
            user = OWNER if busy else "away"  # whose servers do not run
            values["workspace"] = self.hub.workspace(f"/srv/{values['new']}", user, busy)
            values["archive"] = self.hub.archive(f"{values['new']}.tar.gz")
        for word in re.findall(r"\{(\w+)\}", name):
            if word in values:
                continue
            made = self._shown.get(word) if door.method == "GET" else None
            if made is None or word in ("lease", "ticket"):
                made = getattr(self, f"_{word}")(name, right)
            if door.method == "GET":
                self._shown[word] = made
            values |= made
        sent = None
        if right.sent is not None:
            sent = {
                key: value.format(**values) if isinstance(value, str) else value
                for key, value in right.sent.items()
            }
        then = right.then and (right.then[0].format(**values), right.then[1])
        hers = (
            OWNER,
            *(
                values[w]
                for w in ("lease", "ticket", "folder", "run", "sweep", "schedule")
                if w in values
            ),
        )
        path = name.partition(" ")[2].format(**values)
        return Call(name, door, path, _may(name), sent, then, hers)

    def _jobs_ended(self) -> bool:
        jobs = self.hub.service("GET", "api/workspaces/jobs", ADMIN).json()["jobs"]
        return all(job["ended_at"] for job in jobs)

    def _runs_ended(self) -> bool:
        runs = self.hub.service("GET", "api/runs", OWNER).json()["runs"]
        return all(run["ended_at"] for run in runs)

    def _run(self, name: str, right: Right) -> dict[str, str]:
        return {"run": self.hub.ended_run(OWNER, "olgas-secret-plan")}

    def _sweep(self, name: str, right: Right) -> dict[str, str]:
        return {"sweep": self.hub.ended_sweep(OWNER, "olgas-secret-sweep")}

    def _schedule(self, name: str, right: Right) -> dict[str, str]:
        return {"schedule": self.hub.new_schedule(OWNER, "olgas-secret-schedule")}

    def _lease(self, name: str, right: Right) -> dict[str, str]:
        if "refund" in name:
            return {"lease": self.hub.over}
        if self.hub.server(OWNER) is None:
            self.hub.spawn_and_wait(OWNER, {"environment": "small", "gpus": 0})
        [lease] = [x for x in self.hub.open_leases(OWNER) if x.server == ServerRef(OWNER)]
        return {"lease": lease.id}

    def _ticket(self, name: str, right: Right) -> dict[str, str]:
        def waits() -> list[str]:
            told = self.hub.service("GET", "api/queue", OWNER).json()
            return [ticket["id"] for ticket in told["tickets"]]

        if not waits():
            wait_for(lambda: self.hub.server(OWNER, LINE) is None, "the end of her last wait")
            asked = self.hub.spawn(OWNER, {"environment": "small", "gpus": 1}, LINE)
            assert asked.ok, asked.text
        return {"ticket": wait_for(waits, "her ticket")[0]}

    def _transfer(self, name: str, right: Right) -> dict[str, str]:
        self._admin(f"api/accounts/member:{OWNER}/grants", {"amount": "5", "reason": WHY})
        told = self.hub.service("GET", f"api/accounts/member:{OWNER}/statement", ADMIN).json()
        return {"transfer": told["entries"][0]["transfer"]}

    def _rate(self, name: str, right: Right) -> dict[str, str]:
        sent = {"rate": "9", "from": f"{self._new_day()}T00:00:00Z", "reason": WHY}
        return {"rate": str(self._admin("api/rates", sent)["id"])}

    def _new_day(self) -> str:
        """A day that no rate begins on."""
        return str(date(2999, 1, 1) + timedelta(days=next(self._numbers)))

    def _refill(self, name: str, right: Right) -> dict[str, str]:
        sent = {**REFILL, "key": f"new-{next(self._numbers)}", "audience": ["members:ml101"]}
        return {"refill": self._admin("api/refills", sent)["id"]}

    def _entry(self, name: str, right: Right) -> dict[str, str]:
        entry = f"new-{next(self._numbers)}"
        self.hub.put_on_roster(entry)
        return {"entry": entry}

    def _folder(self, name: str, right: Right) -> dict[str, str]:
        self._delete_folders()  # a member may have few
        called = f"plans {next(self._numbers)}"
        made = self.hub.service("POST", "api/folders", OWNER, json={"name": called})
        assert made.ok, made.text
        folder = str(made.json()["id"])
        steps = {"invited": ("invite",), "member": ("invite", "accept"), "deleted": ("delete",)}
        for step in steps.get(right.first, ()):
            who = FRIEND if step == "accept" else OWNER
            sent = {"invite": {"member": FRIEND, "write": True}, "delete": {"name": called}}
            path = f"api/folders/{folder}/{step}"
            answer = self.hub.service("POST", path, who, json=sent.get(step))
            assert answer.ok, answer.text
        return {"folder": folder, "name": called}

    def _delete_folders(self) -> None:
        kept = self._shown.get("folder", {}).get("folder")
        for user in (OWNER, FRIEND):
            for each in self.hub.service("GET", "api/folders", user).json()["folders"]:
                if each["mine"] and each["id"] != kept and not each["deleted_at"]:
                    path = f"api/folders/{each['id']}/delete"
                    gone = self.hub.service("POST", path, user, json={"name": each["name"]})
                    assert gone.ok, gone.text

    def _admin(self, path: str, sent: dict[str, Any]) -> dict[str, Any]:
        answer = self.hub.service("POST", path, ADMIN, json=sent)
        assert answer.ok, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def _settle(self) -> None:
        """Wait until every stop that was ordered has come."""

        def settled() -> bool:
            leases = [x for x in self.hub.leases(OWNER) if x.state is not LeaseState.ENDED]
            here = self.hub.server(OWNER)
            if here is not None and (here["pending"] or not here["ready"]):
                return False
            waits = self.hub.service("GET", "api/queue", OWNER).json()["tickets"]
            if bool(waits) != bool(self.hub.server(OWNER, LINE)):
                return False
            return not any(x.outcome for x in leases) and bool(leases) == bool(here)

        wait_for(settled, "the end of Olga's server", timeout=60)


def shape(hub: AttackHub, door: Door) -> str:
    """A door without the ids: ``POST queue/{ticket}/move``."""
    path = door.path
    # The ticket's id is in two places.
    for value, word in (
        (hub.lease, "lease"),
        (hub.ticket, "ticket"),
        (hub.plans, "folder"),
        (hub.transfer, "transfer"),
        (hub.run, "run"),
        (hub.sweep, "sweep"),
        (hub.schedule, "schedule"),
        (hub.devices[0], "device"),
    ):
        path = path.replace(value, f"{{{word}}}")
    path = re.sub(r"accounts/member:\w+", "accounts/{account}", path)
    path = re.sub(r"members/\w+", "members/{entry}", path)
    path = re.sub(r"\b(rate|refill)s/1\b", r"\1s/{\1}", path)
    return f"{door.method} {path}"


def _changed(call: Call, answer: requests.Response) -> bool:
    """Whether a request that changes something did: a page that asks again did not."""
    if call.scripted:
        return answer.ok
    if answer.is_redirect:
        return "oauth" not in answer.headers["Location"]
    return answer.status_code == 200 and call.path in ("bulk", "members")


def _may(name: str) -> str:
    """Who may do this."""
    if name in RIGHT:
        return RIGHT[name].by
    words = ("admin", "queue", "metrics", "accounts", "transfers", "rates", "refills", "bulk")
    more = ("trail", "usage", "used", "cluster", "devices", "members", "workspaces", "catalog")
    path = name.partition(" ")[2].removeprefix("api/")
    return ADMIN if re.split(r"[/.?]", path)[0] in (*words, *more) else OWNER
