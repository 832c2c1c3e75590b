"""A run that is asked to end saves first, says so, and goes on later in the same folder; Ctrl-C
ends it at once.
"""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from plans import run_folder, small_plan, steps
from support import ended, heed_ctrl_c, plant_modules, wait_until

from trilane.launch.local import environment, train_local
from trilane.logs.run import read_run_folder
from trilane.workspace.status import known_status

pytestmark = pytest.mark.slow
LONG = 2000


@pytest.fixture
def folder(data: Path, tmp_path) -> Path:
    return run_folder(small_plan(data, iters=LONG, source="mock"), tmp_path / "run")


def launch(folder: Path, *more: str) -> subprocess.Popen:
    """The command, as a person types it next to the run folder."""
    command = [str(Path(sys.executable).with_name("trilane")), "train", "run/plan.json", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, cwd=folder.parent, env=environment(8), **pipes, preexec_fn=heed_ctrl_c
    )


def trained(folder: Path) -> int:
    return len(steps(folder)) if (folder / "steps.jsonl").exists() else 0


def saved(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((folder / "checkpoints").glob("iter_*"))]


def saves_when_asked_and_stops_when_told(folder: Path, process: subprocess.Popen) -> None:
    """SIGUSR1, then SIGTERM."""
    wait_until(lambda: trained(folder) > 2 or process.poll() is not None, 300, "training")
    assert process.poll() is None, process.communicate()
    before = trained(folder)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: bool(saved(folder)), 60, "checkpoint")
    [first] = saved(folder)
    wait_until(lambda: trained(folder) > first + 2, 300, "further training")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    last = trained(folder)
    status = known_status(folder)
    assert (process.returncode, status.status, saved(folder)) == (3, "stopped", [first, last])
    assert (
        status.evidence
        == f"stopped at iteration {last} by SIGTERM, saved checkpoints/iter_{last:07d}"
    )
    assert status.evidence in out and before <= first <= before + 5, (
        "the signal passes through two processes"
    )


def ends_at_ctrl_c(folder: Path, process: subprocess.Popen) -> None:
    """Every process, and the folder can be read."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("trilane: interrupted; what was written so far stays readable\n")
    assert known_status(folder).status == "cancelled"
    assert not psutil.wait_procs(family, timeout=5)[1]


@pytest.mark.usefixtures("uncounted_processes")
def test_a_run_saves_when_asked_stops_when_told_and_goes_on_in_the_same_folder_until_ctrl_c(
    folder,
):
    """SIGUSR1 saves within one iteration and the run goes on; SIGTERM saves and ends, exit code 3,
    status "stopped".

    A colleague's json.py, torch.py, ... in the current folder is run by none of the processes.
    """
    trace = plant_modules(folder.parent)
    with ended(launch(folder)) as process:
        saves_when_asked_and_stops_when_told(folder, process)
    last, status = trained(folder), known_status(folder)
    with ended(launch(folder, "--resume")) as process:
        wait_until(lambda: trained(folder) > last + 2, 300, "training again")
        ends_at_ctrl_c(folder, process)
    assert not trace.exists()
    assert [s["iteration"] for s in steps(folder)] == list(range(1, trained(folder) + 1))
    log = (folder / "run.log").read_text()
    assert (
        f"resumes after iteration {last} of" in log
        and status.evidence in log
        and log.endswith("|\n")
    )
    assert (folder / "attempts/1/status.json").exists()
    logged = list(read_run_folder(folder).iterations["iteration"])
    assert logged == list(range(1, len(logged) + 1))
    # Ctrl-C may come between the line of steps.jsonl and that of the log.
    assert trained(folder) - len(logged) in (0, 1)
    (folder / "stop").touch()
    with pytest.raises(ValueError, match="holds the file `stop`"):
        train_local(folder, resume=True)
