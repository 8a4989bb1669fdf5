"""`gpuspawner-run`: submits runs from a terminal of a session, and follows them.

A run executes a program or a notebook with GPUs of its own, and frees them when it ends. This uses
the session's own token, which reaches the runs of its member and no others. Only the standard
library is used.
"""

import argparse
import csv
import http.client
import itertools
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from contextlib import suppress
from datetime import datetime, timezone
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

ENDED = ("done", "failed", "stopped")
PAUSE = 2.0
TIMEOUT = 30.0
PATIENCE = 120.0
"""Seconds for which a request with an idempotency key is sent again while the hub is away."""
LONGEST_TITLE = 100

USAGE = """gpuspawner-run PROGRAM [options] [-- arguments of the program]
       gpuspawner-run NOTEBOOK.ipynb [options] [-p NAME VALUE ...]
       gpuspawner-run PROGRAM --sweep [--at-most N] -p NAME '[VALUE, ...]' [-- --NAME {NAME}]
       gpuspawner-run sweep SWEEP [--stop | --again]
       gpuspawner-run list | logs [-f] RUN | wait RUN | stop RUN"""


class Refused(Exception):
    """A sentence for the member."""


class NoAnswer(Refused):
    """The hub did not answer: it may have done what it was asked."""


class HubAway(NoAnswer):
    """The hub or its service cannot be reached, as while it restarts."""


def main(arguments=None):
    """Run the command; the exit status is 1 after a refusal, and that of the run for `wait`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            return COMMANDS[words[0]](words[1:])
        return submit(words)
    except Refused as error:
        print(f"gpuspawner-run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def gpus(word):
    """Return a number of GPUs, or the word for a share of one."""
    return word if word == "share" else int(word)


def submit(words):
    """Submit a program or a notebook."""
    own, rest = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = argparse.ArgumentParser(prog="gpuspawner-run", usage=USAGE)
    parser.add_argument("program", help="a program, a .py file or an .ipynb notebook")
    parser.add_argument(
        "--gpus",
        type=gpus,
        help="how many, or 'share' for a share of one; the environment's default if left out",
    )
    parser.add_argument("--hours", type=float, help="the time limit")
    parser.add_argument("--model", dest="gpu_model", help="the GPU model, such as A100")
    parser.add_argument(
        "--gpu-memory", type=int, metavar="GB", help="the least memory of each GPU, or of the share"
    )
    parser.add_argument("--environment", help="its name in the catalog; this session's if left out")
    parser.add_argument("--account", help="who pays, such as group:vision")
    parser.add_argument("--title", default="", help="its title in lists")
    parser.add_argument(
        "--requeue", action="store_true", help="begin again, at most three times, if interrupted"
    )
    parser.add_argument(
        "--preemptible",
        action="store_true",
        help="for less: only on GPUs that nobody else can use, which it yields when asked",
    )
    parser.add_argument(
        "--key", default="", help="idempotency key: submitting again with it returns the first run"
    )
    parser.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE")
    )
    parser.add_argument(
        "--sweep", action="store_true", help="a run for each combination of the lists in -p"
    )
    parser.add_argument("--sweep-csv", metavar="FILE", help="a run for each line of a CSV file")
    parser.add_argument(
        "--at-most", type=int, help="how many runs of the sweep may wait or run at once"
    )
    parser.add_argument("--yes", action="store_true", help="submit the sweep without a question")
    asked = parser.parse_args(own)
    options = {
        name: getattr(asked, name)
        for name in ("gpus", "hours", "gpu_model", "gpu_memory", "environment", "account")
        if getattr(asked, name) is not None
    }
    if "environment" not in options and os.environ.get("GPUSPAWNER_ENVIRONMENT"):
        options["environment"] = os.environ["GPUSPAWNER_ENVIRONMENT"]
    body = {
        "title": asked.title or Path(asked.program).stem,
        "options": options,
        "requeue": asked.requeue,
        "preemptible": asked.preemptible,
        "key": asked.key or uuid.uuid4().hex,
        "directory": in_workspace(Path.cwd(), "the current folder"),
    }
    if asked.sweep or asked.sweep_csv:
        return submit_sweep(asked, body, rest)
    if asked.at_most:
        raise Refused("--at-most is for a sweep: add --sweep or --sweep-csv FILE")
    if asked.program.endswith(".ipynb"):
        if rest:
            raise Refused(
                "a notebook takes its parameters with -p NAME VALUE, and nothing after --"
            )
        body["parameters"] = {name: parsed(value) for name, value in asked.parameters}
        copy = snapshot(Path(asked.program), body["title"])
        run = submit_copy(body, copy, ask_until_answered)
    elif asked.parameters:
        raise Refused("only a notebook has parameters: give a program its arguments after --")
    else:
        run = ask_until_answered("POST", "", {**body, "command": command(asked.program) + rest})
    print(f"{run['id']} is submitted. Its files are in {run['folder']} in your workspace.")
    return 0


def submit_sweep(asked, body, rest):
    """Submit a run for each set of parameters, once the member has read what that costs."""
    parameters = {name: parsed(value) for name, value in asked.parameters}
    if asked.sweep_csv:
        sets = read_sets(Path(asked.sweep_csv))
    else:
        lists = {name: value for name, value in parameters.items() if isinstance(value, list)}
        if not lists:
            raise Refused("--sweep needs a list of values, such as -p lr '[0.1, 0.01]'")
        parameters = {name: value for name, value in parameters.items() if name not in lists}
        choices = ([(name, value) for value in lists[name]] for name in lists)
        sets = [dict(chosen) for chosen in itertools.product(*choices)]
    body.update(parameters=parameters, sets=sets, at_most=asked.at_most)
    program = Path(asked.program)
    is_notebook = asked.program.endswith(".ipynb")
    if is_notebook and rest:
        raise Refused("a notebook takes its parameters with -p NAME VALUE, and nothing after --")
    if is_notebook:
        body["notebook"] = in_workspace(program, "the notebook")
    else:
        body["command"] = command(asked.program) + rest
    print(price_of(ask_until_answered("POST", "/-/quote", body, "sweeps"), asked.at_most))
    if not asked.yes and not confirmed("Submit them?"):
        return 1
    if is_notebook:
        body["notebook"] = snapshot(program, body["title"])
    sweep = ask_until_answered("POST", "", body, "sweeps")
    print(f"{sweep['id']} is submitted: `gpuspawner-run sweep {sweep['id']}` shows its runs.")
    return 0


def read_sets(file):
    """Return the lines of a CSV file, each as parameters by the names in its first line."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.DictReader(lines, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{file} cannot be read: {error}") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise Refused(f"{file}: row {number} has not as many values as the first line names")
    if not rows:
        raise Refused(f"{file} needs a line with names, and a line of values for each run")
    return [{name: parsed(value) for name, value in row.items()} for row in rows]


def price_of(quote, at_most):
    """Return what a sweep costs at most, in words."""
    rate, hold = credits(quote["rate_per_hour"]), credits(quote["hold"])
    at_once = f", at most {at_most} at once" if at_most and at_most < quote["runs"] else ""
    count = f"{quote['runs']} {'run' if quote['runs'] == 1 else 'runs'}{at_once}"
    if quote["most"] is None:
        cost = f"Without a time limit, each costs up to {rate} credits an hour until it ends."
    else:
        hours = f"{quote['seconds'] / 3600:g}"
        cost = (
            f"If each takes its {hours} hours, they cost {credits(quote['most'])} credits at most: "
            f"up to {rate} an hour each."
        )
    return f"{count}. {cost} {hold} must be available for those that begin at once."


def credits(amount):
    """Return an amount, rounded up to hundredths, without zeros at its end."""
    return f"{Decimal(amount).quantize(Decimal('0.01'), ROUND_CEILING).normalize():f}"


def confirmed(question):
    """Return True if the member says yes."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise Refused("there is nobody to ask: --yes submits without a question") from None


def sweep(words):
    """Show a sweep, stop all its runs, or submit those that failed again."""
    parser = argparse.ArgumentParser(prog="gpuspawner-run sweep")
    parser.add_argument("sweep")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stop", action="store_true", help="stop all its runs")
    what.add_argument("--again", action="store_true", help="submit the failed ones once more")
    asked = parser.parse_args(words)
    path = f"/{name_of(asked.sweep)}"
    if asked.again:
        body = {"key": uuid.uuid4().hex}
        found = ask_until_answered("POST", f"{path}/again", body, "sweeps")
        print(f"{found['id']} is submitted.")
    else:
        found = ask("DELETE" if asked.stop else "GET", path, of="sweeps")
    for run in found["runs"]:
        print(f"{run['id']:30}  {run['state']:8}  {run['title']}  {run['reason']}".rstrip())
    states = ", ".join(f"{count} {state}" for state, count in sorted(found["states"].items()))
    print(f"{states}. Charged: {credits(found['charged'])} credits.")
    return 0


def command(program):
    """Return the words that start a program."""
    path = Path(program)
    if program.endswith(".py"):
        if not path.is_file():
            raise Refused(f"there is no file {program}")
        return ["python3", "-u", program]
    return [program]


def workspace():
    """Return the workspace: what a run sees of this container."""
    return Path(os.environ.get("GPUSPAWNER_WORKSPACE") or Path.home()).resolve()


def in_workspace(path, what):
    """Return a path relative to the workspace."""
    try:
        found = path.resolve().relative_to(workspace())
    except ValueError:
        raise Refused(
            f"{what} is not in your workspace, {workspace()}: a run sees nothing else"
        ) from None
    return "" if str(found) == "." else str(found)


def snapshot(notebook, title, where="runs"):
    """Copy a notebook into a folder of its own: what is edited later does not change it."""
    try:
        text = notebook.read_bytes()
        json.loads(text)["cells"]
    except OSError as error:
        raise Refused(f"{notebook} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{notebook} is not a notebook") from None
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in title)
    name = f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{safe.strip('.-') or 'run'}"
    runs, number = workspace() / where, 1
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            folder = runs / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):  # another one in the same second
                folder.mkdir()
                break
            number += 1
        (folder / "input.ipynb").write_bytes(text)
    except OSError as error:
        raise Refused(f"{runs} cannot be written: {error.strerror}") from None
    return f"{where}/{folder.name}/input.ipynb"


def submit_copy(body, copy, send=None):
    """Submit the run of a copied notebook; the copy is removed if the run is refused.

    ``send`` is what sends the request: :func:`ask` if left out.
    """
    try:
        return (send or ask)("POST", "", {**body, "notebook": copy})
    except NoAnswer:
        raise  # the run may be there, and need its copy
    except Refused:
        with suppress(OSError):
            (workspace() / copy).unlink()
            (workspace() / copy).parent.rmdir()
        raise


def parsed(value):
    """Return a parameter parsed as JSON, or the text if it is not JSON."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def list_runs(words):
    """Print the newest runs."""
    argparse.ArgumentParser(prog="gpuspawner-run list").parse_args(words)
    for run in ask("GET", "?limit=20")["runs"]:
        print(
            f"{run['id']:30}  {run['state']:8}  {run['created_at'][:16]}  {run['reason']}".rstrip()
        )
    return 0


def logs(words):
    """Print a run's output, and follow it."""
    parser = argparse.ArgumentParser(prog="gpuspawner-run logs")
    parser.add_argument("-f", "--follow", action="store_true", help="until the run ends")
    parser.add_argument("run")
    asked = parser.parse_args(words)
    run = ask("GET", f"/{name_of(asked.run)}")
    log, seen = workspace() / run["folder"] / "run.log", 0
    while True:
        seen += show(log, seen)
        if not asked.follow or run["state"] in ENDED:
            break
        time.sleep(PAUSE)
        run = ask("GET", f"/{name_of(asked.run)}")
    show(log, seen)
    if not log.exists():
        print(f"{run['id']} has no output yet: it is {run['state']}.", file=sys.stderr)
    return 0


def show(log, start):
    """Print what a file has beyond a position, and return how many bytes."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            part = file.read()
    except FileNotFoundError:
        return 0
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()
    return len(part)


def wait(words):
    """Wait for a run's end, and return its exit status."""
    parser = argparse.ArgumentParser(prog="gpuspawner-run wait")
    parser.add_argument("run")
    asked = parser.parse_args(words)
    while (run := ask("GET", f"/{name_of(asked.run)}"))["state"] not in ENDED:
        time.sleep(PAUSE)
    verb = "" if run["state"] == "failed" else {"done": "is ", "stopped": "was "}[run["state"]]
    print(f"{run['id']} {verb}{run['state']}. {run['reason']}".rstrip())
    return 0 if run["state"] == "done" else run["exit_status"] or 1


def stop(words):
    """Stop a run."""
    parser = argparse.ArgumentParser(prog="gpuspawner-run stop")
    parser.add_argument("run")
    run = ask("DELETE", f"/{name_of(parser.parse_args(words).run)}")
    print(f"{run['id']}: {run['state'] if run['state'] in ENDED else 'it is being stopped'}.")
    return 0


COMMANDS = {"list": list_runs, "logs": logs, "wait": wait, "stop": stop, "sweep": sweep}


def name_of(run):
    """Return a run's id as part of a URL."""
    return urllib.parse.quote(run, safe="")


def ask(method, path, body=None, of="runs"):
    """Send a request to the hub, and return its answer."""
    api, token = (os.environ.get(f"JUPYTERHUB_API_{name}") for name in ("URL", "TOKEN"))
    if not (api and token):
        raise Refused("this works in a session of the hub; a run itself cannot submit runs")
    request = urllib.request.Request(
        f"{api.rstrip('/')}/gpuspawner/{of}{path}",
        method=method,
        headers={"Authorization": f"token {token}", "Content-Type": "application/json"},
        data=None if body is None else json.dumps(body).encode(),
    )
    try:
        # The hub has set the address.
        answer = urllib.request.urlopen(request, timeout=TIMEOUT, context=tls())  # nosec B310
        with answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["message"]
        except (ValueError, KeyError, TypeError):
            message = f"the hub answered {error.code}"
        if error.code in (502, 503, 504):
            raise HubAway(message) from None
        raise (Refused if error.code < 500 else NoAnswer)(message) from None
    except OSError:
        raise HubAway("the hub does not respond; try again in a moment") from None
    except (http.client.HTTPException, ValueError):
        raise NoAnswer("the hub's answer was cut short; try again in a moment") from None


def ask_until_answered(method, path, body, of="runs"):
    """Send a request that has an idempotency key, again and again while the hub is away.

    The hub does what such a request asks once, no matter how often it arrives.
    """
    deadline, is_told = time.monotonic() + PATIENCE, False
    while True:
        try:
            return ask(method, path, body, of)
        except HubAway:
            if not body["key"] or time.monotonic() + PAUSE > deadline:
                raise
        if not is_told:
            minutes = f"{PATIENCE / 60:g}"
            print(
                f"The hub does not respond. Trying again for {minutes} minutes; "
                "nothing is submitted twice.",
                file=sys.stderr,
                flush=True,
            )
            is_told = True
        time.sleep(PAUSE)


def tls():
    """Return the certificates of this server, if the hub uses its own."""
    files = ("JUPYTERHUB_SSL_KEYFILE", "JUPYTERHUB_SSL_CERTFILE", "JUPYTERHUB_SSL_CLIENT_CA")
    key, certificate, authority = (os.environ.get(name) for name in files)
    if not key:
        return None
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key)
    return context


if __name__ == "__main__":
    sys.exit(main())
