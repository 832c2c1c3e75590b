"""An incident is one verdict on whatever files a folder has; what they do not show is stated."""

import json
from random import Random

import pytest
from plants import data_loader, write

from trilane.cli.app import main
from trilane_diagnose.incident import read_incident

STEP = (
    " [2026-11-27 15:34:{:02}] iteration {:8}/ 100 | elapsed time per iteration (ms): 281.6 "
    "| lm loss: 6.24E+00 |\n"
)
WATCHDOG = (
    "[rank7]:[E1127 15:44:02.123 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, "
    "Timeout(ms)=600000) ran for 600001 ms\n"
)
HEAD = "JobID|State|ExitCode|NodeList|Reason\n"
TRACEBACK = "[rank12]: Traceback (most recent call last):\n[rank12]: ValueError: bad\n"


@pytest.mark.parametrize(
    ("printed", "accounting", "verdict"),
    [
        (
            "srun: error: gpu3: task 3: Killed\n",
            "7|OUT_OF_MEMORY|0:125|gpu[1-4]\n7.0|OUT_OF_MEMORY|0:125|gpu3\n",
            "host memory: job 7.0",
        ),
        ("", "7|FAILED|1:0|g\n7.0|CANCELLED|0:15|g\n", "crashed: job 7: FAILED"),
        ("", "7|FAILED|9:0|g\n", "crashed: job 7: FAILED on g, exit code 9:0\n9:0 may"),
        ("", "7|NODE_FAIL|1:0|g\n7|COMPLETED|0:0|h\n", "completed: job 7"),
        ("", "7|REQUEUED|0:0|g\n7.batch|CANCELLED|0:15|g\n", "cannot be determined"),
        ("", "7|TIMEOUT|0:0|g\n8|CANCELLED by 1|0:0|None assigned\n", "time limit"),
        (TRACEBACK, "7|CANCELLED by 1000|0:0|gpu3\n", "crashed on rank 12"),
        ("", "6|TIMEOUT|0:0|gpu1\n10|NODE_FAIL|1:0|gpu4\n", "node failure: job 10"),
        ("", "7|FAILED|1:0|g\n7.batch|FAILED|0:53|g\n", "environment: launch failure"),
        ("", "7|PENDING|0:0|None assigned|Resources\n", "waiting: job 7: PENDING on None"),
        ("", "", "cannot be determined from these files"),
    ],
)
def test_of_copied_files_the_reason_is_found(printed: str, accounting: str, verdict: str, tmp_path):
    """SLURM's CANCELLED is no reason where a rank failed; of its steps the one that ran out of
    memory has the node.
    """
    (tmp_path / "job.out").write_text(STEP.format(1, 1) + STEP.format(2, 2) + printed)
    (tmp_path / "accounting.txt").write_text(HEAD + accounting)
    incident = read_incident(tmp_path)
    assert incident.summary().startswith(verdict)


def test_a_hang_of_384_ranks_is_joined_with_its_log(tmp_path, capsys):
    scene = data_loader(Random(1))
    folder = tmp_path / "copied"
    write(folder, scene)
    (guilty,) = scene.guilty
    (folder / "train.log").write_text(STEP.format(1, 1) + WATCHDOG)
    assert main(["debug", "incident", str(folder), "--json"]) == 0
    incident = json.loads(capsys.readouterr().out)
    assert incident["hang"]["suspects"] == [guilty]
    assert "cannot be determined" not in " ".join(incident["verdict"])
    assert incident["status"] == "hang"
    assert "on rank 7" not in incident["verdict"][0], "it only waited"


def test_a_run_that_completed_had_no_incident_and_an_empty_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "run.log").write_text("".join(STEP.format(n, n + 90) for n in range(1, 11)))
    assert read_incident(tmp_path).verdict[0].startswith("completed")
    (tmp_path / "run.log").write_text("")
    assert main(["debug", "incident", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
