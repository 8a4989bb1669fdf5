"""How many idle GPU-hours come back, and who is cut who would have worked soon.

Sessions are drawn, with a seed, as ``support/idle_sessions.py`` says. Each policy sees each session
minute by minute, as the accounting service does. A session that is cut ends there; its idle time
from then on is returned. It is cut wrongly when one of its tasks runs just then, or would have
begun within 10 minutes. Nobody snoozes and nobody works because of a warning: that is the worst
that can be. The last row is ours when members who would have worked within 30 minutes of the
warning snooze.

The others: the stock culler of JupyterHub (an hour without output, looked at every 10 minutes),
Northeastern's IdleBot (mail after 15 minutes without use, cancelled after 60) and Princeton's rule
(2 hours of zero). Trying is not the same as using: the pretended work of some sessions counts as
use for those that only ask whether it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from random import Random

from support.idle_sessions import Session, Shape, draw
from support.report import Report, Series, argument_parser

from gpuspawner.monitoring.idle import Activity, IdlePolicy, begin, judge, snooze

T0 = datetime(2026, 3, 1, tzinfo=timezone.utc)
MINUTES = [T0 + timedelta(minutes=n + 1) for n in range(72 * 60 + 1)]
LEAST_RETURNED = 75.0
MOST_WRONG = 0.5
SOON = 10.0

OURS = IdlePolicy(mode="enforce")
Policy = Callable[[Session], "int | None"]


def none(session: Session) -> int | None:
    """Nobody is ever stopped."""
    return None


def culler(session: Session) -> int | None:
    """An hour without a message of a kernel, looked at every ten minutes."""
    last = 0
    for minute in range(session.minutes):
        if session.output[minute] or session.busy[minute]:
            last = minute
        if minute % 10 == 0 and minute - last >= 60:
            return minute
    return None


def zero_for(most: int) -> Policy:
    """So many minutes without any use."""

    def policy(session: Session) -> int | None:
        idle = 0
        for minute in range(session.minutes):
            idle = 0 if session.worked(minute) else idle + 1
            if idle >= most:
                return minute
        return None

    return policy


def ours(policy: IdlePolicy, *, answers: bool = False) -> Policy:
    """The production rule; ``answers``: whoever would work soon snoozes."""

    def decide(session: Session) -> int | None:
        state = begin(policy)
        for minute in range(session.minutes):
            seen = Activity(
                seconds=60.0,
                use=session.use(minute),
                busy=session.worked(minute),
                output=session.output[minute],
            )
            verdict = judge(policy, state, seen, MINUTES[minute])
            state = verdict.state
            if verdict.event == "stop":
                return minute
            if answers and verdict.event == "warn" and _soon(session, minute, 30.0):
                state = snooze(policy, state, MINUTES[minute]) or state
        return None

    return decide


def _soon(session: Session, minute: int, within: float) -> bool:
    at = minute + 1.0
    return any(begin < at + within and end > at for begin, end in session.tasks)


def main() -> None:
    parser = argument_parser(__doc__, 5)
    parser.add_argument("--sessions", type=int, default=4000, help="of each run")
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args()
    columns = ("sessions", "policy", "runs", "idle GPU-hours returned, %", "cut wrongly, %")
    report = Report("idle_policy", (*columns, "sessions cut, %"))
    report.figure("runs", options.runs)
    shapes = (
        ("as assumed", "", Shape()),
        ("half as long", "short_", Shape(session=120.0, pause=90.0)),
        ("twice as long", "long_", Shape(session=480.0, pause=360.0)),
    )
    for name, prefix, shape in shapes:
        runs = [
            [draw(random, shape) for _ in range(options.sessions)]
            for random in (Random(options.seed + n) for n in range(options.runs))
        ]
        if not prefix:
            report.notes.append(_described([session for run in runs for session in run]))
        policies: list[tuple[str, str, Policy]] = [
            ("none", "none", none),
            ("stock culler", "culler", culler),
            ("IdleBot", "idlebot", zero_for(60)),
            ("Princeton", "princeton", zero_for(120)),
            ("ours", "ours", ours(OURS)),
            ("ours, members answer", "answered", ours(OURS, answers=True)),
        ]
        for label, key, policy in policies:
            _row(report, name, label, f"{prefix}{key}", policy, runs, target=key == "ours")
    report.print(options.json)


def _row(
    report: Report,
    shape: str,
    label: str,
    key: str,
    policy: Policy,
    runs: Iterable[list[Session]],
    *,
    target: bool,
) -> None:
    found = [_judged(policy, sessions) for sessions in runs]
    returned, wrong, cut = (Series(tuple(run[at] for run in found)) for at in range(3))
    cells = (returned.text(), wrong.text(2), cut.text())
    report.row(shape, label, str(len(found)), *cells)
    whole = target and key == "ours"
    report.figure(
        f"{key}_kept_percent", 100 - returned.median, 100 - LEAST_RETURNED if whole else None
    )
    report.figure(f"{key}_wrong_percent", wrong.median, MOST_WRONG if whole else None)


def _judged(policy: Policy, sessions: list[Session]) -> tuple[float, float, float]:
    """Percent of idle time that is returned, of sessions that are cut wrongly, and cut at all."""
    idle = returned = 0.0
    wrong = cuts = 0
    for session in sessions:
        rest = [60 - busy for busy in session.busy]
        idle += sum(rest)
        cut = policy(session)
        if cut is None:
            continue
        cuts += 1
        returned += sum(rest[cut + 1 :])
        wrong += _soon(session, cut, SOON)
    return 100 * returned / idle, 100 * wrong / len(sessions), 100 * cuts / len(sessions)


def _described(sessions: list[Session]) -> str:
    """What was drawn, beside what was published."""
    busy = [sum(session.busy) / 60 for session in sessions]
    tasks = sorted(end - begin for session in sessions for begin, end in session.tasks)
    gaps = sorted(
        later[0] - earlier[0]
        for session in sessions
        for earlier, later in zip(session.tasks, session.tasks[1:], strict=False)
    )
    count = len(sessions)
    little = sum(b <= 0.05 * s.minutes for b, s in zip(busy, sessions, strict=True))
    return (
        f"drawn (published): never used {sum(not b for b in busy) / count:.0%} (nearly 70 %), "
        f"at most 5 % used {little / count:.0%} (3/4), "
        f"idle {1 - sum(busy) / sum(s.minutes for s in sessions):.0%} (over 81 %), "
        f"tasks {tasks[len(tasks) // 2]:.1f} and {tasks[len(tasks) * 3 // 4]:.1f} min (2 and 5), "
        f"between their starts {gaps[len(gaps) // 2]:.1f} min (5), at least {gaps[0]:.1f} (4)"
    )


if __name__ == "__main__":
    main()
