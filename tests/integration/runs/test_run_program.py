"""What carries out a run in its container. Real: the program, papermill, a kernel; no container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest

from gpuspawner.runs import run_program
from tests.support.processes import wait_for


def start(
    workspace: Path, seconds: int | None = None, *, before: str = "", **work: Any
) -> subprocess.Popen[str]:
    """``before``: lines of Python that are run before the program's own."""
    told = {"command": [], "notebook": "", "parameters": {}, "directory": "", "folder": "runs/one"}
    environment = {
        "GPUSPAWNER_WORKSPACE": str(workspace),
        "GPUSPAWNER_RUN_ID": "one-0a1b2c3d",
        "GPUSPAWNER_RUN_WORK": json.dumps(told | work),
        "GPUSPAWNER_RUN_SECONDS": "" if seconds is None else str(seconds),
    }
    program = Path(run_program.__file__).read_text(encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-c", f"{before}\nexec({program!r})" if before else program],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_until_the_end(process: subprocess.Popen[str]) -> str:
    """What the program printed: its report, which comes last, is left out."""
    said, _ = process.communicate(timeout=120)
    program, _, report = said.rpartition(f"\n{run_program.REPORT}")
    assert report.endswith("}\n")
    return program


def carried_out(
    workspace: Path, seconds: int | None = None, *, before: str = "", **work: Any
) -> tuple[int, str]:
    process = start(workspace, seconds, before=before, **work)
    said = said_until_the_end(process)
    return process.returncode, said


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_output_and_exit_status_are_kept(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    program = "import os; print(os.getcwd(), flush=True); print(open(0).read() == ''); exit(5)"
    status, said = carried_out(tmp_path, command=python(program), directory="project")
    assert (status, said) == (5, f"{tmp_path}/project\nTrue\n")
    assert (tmp_path / "runs/one/run.log").read_text() == said
    told = json.loads((tmp_path / "runs/one/run.json").read_text())
    assert (told["id"], told["exit_status"], told["directory"]) == ("one-0a1b2c3d", 5, "project")


def test_use_is_measured_by_both_versions_of_cgroups(tmp_path: Path) -> None:
    """Else the time counts of the program and of those that it waited for."""
    before = time.process_time()
    subprocess.run(python("import time\nwhile time.process_time() < 0.3: pass"), check=True)
    own = run_program.measure(tmp_path)
    assert own["cpu_seconds"] >= before + 0.3 and own["memory_bytes"] > 2**20
    (tmp_path / "cpuacct").mkdir()
    (tmp_path / "cpuacct/cpuacct.usage").write_text("424344162200000\n")
    assert run_program.measure(tmp_path)["cpu_seconds"] == 424344.1622
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 724344100000\nuser_usec 700000\n")
    assert run_program.measure(tmp_path)["cpu_seconds"] == 724344.1
    for nothing in ("usage_usec 0\n", "usage\n"):
        (tmp_path / "cpu.stat").write_text(nothing)
        assert own["cpu_seconds"] <= run_program.measure(tmp_path)["cpu_seconds"] < 100_000


def test_program_knows_its_end(tmp_path: Path) -> None:
    before = datetime.now(timezone.utc).replace(microsecond=0)
    program = "import os; print(os.environ['GPUSPAWNER_STOP_AT'])"
    _, said = carried_out(tmp_path, 3600, command=python(program))
    assert before <= datetime.fromisoformat(said.strip()) - timedelta(hours=1)


IN_STEP = """
import os, threading, time

class Timer(threading.Timer):
    def run(self):
        while not os.path.exists("ready"):  # a slow start is no part of this
            time.sleep(0.01)
        super().run()

def warned(group, number, killpg=os.killpg):
    killpg(group, number)
    open("warned", "w").close()

threading.Timer, os.killpg = Timer, warned
"""


@pytest.mark.parametrize("handles", [True, False])
def test_program_is_warned_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handles: bool
) -> None:
    """A second from its start here; who does not know of the signal goes on."""
    monkeypatch.chdir(tmp_path)
    handler = "signal.signal(signal.SIGUSR1, lambda *_: print('saved', flush=True))"
    program = f"""import os, signal, time
{handler if handles else ""}
open('ready', 'w').close()
while not os.path.exists('warned'): time.sleep(0.01)
print('end')"""
    status, said = carried_out(tmp_path, 121, before=IN_STEP, command=python(program))
    assert (status, said) == (0, "saved\nend\n" if handles else "end\n")


def test_stop_lets_the_program_save(tmp_path: Path) -> None:
    program = (
        "import time\ntry: print('on', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: print('saved')"
    )
    process = start(tmp_path, command=python(program))
    log = tmp_path / "runs/one/run.log"
    wait_for(lambda: log.exists() and "on" in log.read_text(), "its first line")
    process.send_signal(signal.SIGTERM)
    said = said_until_the_end(process)
    assert (process.returncode, said) == (run_program.INTERRUPTED, "on\nsaved\n")


STOPPED_AT_ITS_END = """
import os, signal, subprocess

def wait(process, known=subprocess.Popen.wait):
    status = known(process)
    os.kill(os.getpid(), signal.SIGTERM)
    return status

subprocess.Popen.wait = wait
"""


def test_run_that_is_stopped_when_its_program_has_just_ended_has_a_record(tmp_path: Path) -> None:
    program = python("print('end')")
    status, said = carried_out(tmp_path, before=STOPPED_AT_ITS_END, command=program)
    assert (status, said) == (run_program.INTERRUPTED, "end\n")
    assert recorded(tmp_path)["exit_status"] == run_program.INTERRUPTED


@pytest.mark.parametrize("handles", [True, False])
def test_program_makes_room(tmp_path: Path, handles: bool) -> None:
    """It is warned if it handles that; else it is interrupted at once, and may save."""
    handler = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
    program = "import time\ntry: print('on', flush=True); time.sleep(60)\n"
    program += "except KeyboardInterrupt: print('saved', flush=True); raise"
    process = start(tmp_path, command=python((handler if handles else "") + program))
    log = tmp_path / "runs/one/run.log"
    wait_for(lambda: log.exists() and log.read_text() == "on\n", "the program")
    process.send_signal(run_program.YIELD)
    process.communicate(timeout=120)
    assert process.returncode == (75 if handles else run_program.INTERRUPTED)
    assert log.read_text().startswith("on\n" if handles else "on\nsaved\n")


def notebook(path: Path, *cells: str, kernel: str = "python3") -> None:
    found = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    found.cells[0].metadata["tags"] = ["parameters"]
    found.metadata["kernelspec"] = {
        "name": kernel,
        "display_name": "Python",
        "language": "python",
    }
    nbformat.write(found, path)


def outputs(path: Path) -> list[str]:
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type == "code"
    ]


def test_notebook_gets_parameters_and_keeps_finished_cells(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", "seed = 1", "print(seed)", "1 / 0", "print('never')")
    status, said = carried_out(tmp_path, notebook="a.ipynb", parameters={"seed": [3, "x"]})
    assert status == 1 and said.endswith("\ncell 4: ZeroDivisionError: division by zero\n")
    assert "[3, 'x']\n" in outputs(tmp_path / "runs/one/output.ipynb")
    assert "never" not in outputs(tmp_path / "runs/one/output.ipynb")


def recorded(workspace: Path) -> dict[str, Any]:
    file = workspace / "runs/one/run.json"
    told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return told


def test_record_says_which_cell_is_executed(tmp_path: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)"
    cells = [waits.format(f"go{number}") for number in (1, 2)]
    notebook(tmp_path / "a.ipynb", "seed = 1", *cells, "print(seed)")
    process = start(tmp_path, notebook="a.ipynb", parameters={"seed": 2})

    def executes(number: int) -> bool:
        return [recorded(tmp_path).get(name) for name in ("cell", "cells")] == [number, 5]

    for number in (3, 4):  # after the tagged cell and the one that papermill adds
        wait_for(partial(executes, number), f"cell {number}", timeout=60)
        (tmp_path / f"go{number - 2}").touch()
    process.communicate(timeout=120)
    assert recorded(tmp_path)["cell"] == 5 and recorded(tmp_path)["exit_status"] == 0
    assert {"input.ipynb", "output.ipynb", "run.log"} <= {
        each["path"] for each in recorded(tmp_path)["files"]
    }


def test_notebook_runs_from_its_snapshot(tmp_path: Path) -> None:
    """Also when it begins again after an interruption, and the original has changed."""
    notebook(tmp_path / "a.ipynb", "seed = 1", "print('first')")
    carried_out(tmp_path, notebook="a.ipynb")
    notebook(tmp_path / "a.ipynb", "seed = 1", "print('edited')")
    assert carried_out(tmp_path, notebook="a.ipynb")[0] == 0
    assert "first\n" in outputs(tmp_path / "runs/one/output.ipynb")


def test_missing_notebook_is_told(tmp_path: Path) -> None:
    status, said = carried_out(tmp_path, notebook="a.ipynb")
    assert (status, said) == (127, f"{tmp_path}/a.ipynb cannot start: No such file or directory\n")


def test_regular_files_of_the_folder_are_listed(tmp_path: Path) -> None:
    program = (
        "import os; os.chdir(os.environ['GPUSPAWNER_RUN_FOLDER'])\n"
        "os.makedirs('out/.kept'); open('out/.kept/x', 'w'); open('.x', 'w')\n"
        "os.symlink('/etc', 'link'); os.mkfifo('pipe'); open('out/b', 'w').write('four')\n"
        "for n in range(1100): open(f'out/n{n:04}', 'w')"
    )
    assert carried_out(tmp_path, command=python(program)) == (0, "")
    files = recorded(tmp_path)["files"]
    assert files[1:4] == [
        {"path": "run.log", "size": 0},
        {"path": "out/b", "size": 4},
        {"path": "out/n0000", "size": 0},
    ]
    assert len(files) == run_program.MOST_FILES


def test_stopped_run_has_a_record(tmp_path: Path) -> None:
    process = start(tmp_path, command=python("open('new', 'w'); import time; time.sleep(60)"))
    wait_for((tmp_path / "new").exists, "its file")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    told = recorded(tmp_path)
    assert told["exit_status"] == run_program.INTERRUPTED and told["started_at"]


def test_killed_notebook_has_every_finished_cell(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", "", "print('first')", "import time; time.sleep(60)")
    process = start(tmp_path, notebook="a.ipynb")
    output = tmp_path / "runs/one/output.ipynb"
    wait_for(lambda: output.exists() and "first\n" in outputs(output), "the first cell", timeout=60)
    group = os.getpgid(process.pid)
    assert group == os.getpgid(0)  # papermill and its kernel are in a session of their own
    children = [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    process.kill()
    for child in children:
        os.killpg(child, signal.SIGKILL)
    process.communicate(timeout=120)
    assert "first\n" in outputs(output)


def test_full_workspace_keeps_every_finished_cell(tmp_path: Path) -> None:
    """A limit on the size of its files stands for a quota: a write ends in the middle."""
    notebook(tmp_path / "a.ipynb", "", "print('first')", "print(200_000 * 'x')", "print('last')")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    process = start(tmp_path, before=limit, notebook="a.ipynb")
    said = said_until_the_end(process)
    assert process.returncode == 1 and said.endswith("OSError: [Errno 27] File too large\n")
    output = tmp_path / "runs/one/output.ipynb"
    assert "first\n" in outputs(output)
    assert not output.with_name("output.ipynb.part").exists()


def test_bad_notebook_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("no JSON")
    status, said = carried_out(tmp_path, notebook="a.ipynb")
    assert status == 1
    assert said.endswith("NotJSONError: Notebook does not appear to be JSON: 'no JSON'\n")


def test_missing_kernel_is_told(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", "1", kernel="fortran77")
    status, said = carried_out(tmp_path, notebook="a.ipynb")
    assert status == 1 and said.splitlines()[-1].endswith("No such kernel named fortran77")


def test_unknown_parameter_is_told_and_set(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", "seed = 1", "print(sede)")
    status, said = carried_out(tmp_path, notebook="a.ipynb", parameters={"sede": 3})
    assert status == 0 and "Passed unknown parameter: sede" in said
    assert "3\n" in outputs(tmp_path / "runs/one/output.ipynb")


@pytest.mark.parametrize("own", [143, 255])
def test_program_cannot_look_interrupted(tmp_path: Path, own: int) -> None:
    status, said = carried_out(tmp_path, command=python(f"print('end'); exit({own})"))
    assert (status, said) == (1, "end\n")
    assert f"Its own exit status was {own}" in (tmp_path / "runs/one/run.log").read_text()


def test_missing_folder_is_told(tmp_path: Path) -> None:
    status, said = carried_out(tmp_path, command=["true"], directory="gone")
    assert (status, said) == (127, f"{tmp_path}/gone cannot start: No such file or directory\n")


def test_missing_program_is_told(tmp_path: Path) -> None:
    status, said = carried_out(tmp_path, command=["no-such-program"])
    assert (status, said) == (127, "no-such-program cannot start: No such file or directory\n")
