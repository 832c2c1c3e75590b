"""The command line: its groups, its errors, its exit codes."""

import subprocess
import sys

import pytest

from trilane.cli.app import GROUPS, main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "command=pln: did you mean plan?"),
        (
            ["logs", "parse", "a.log", "--jsn"],
            "option=--jsn: did you mean --json? known: --csv, --dialect, --help, --json",
        ),
        (["logs", "parse", "a.log", "--watch"], "option=--watch: is now `trilane slurm watch`"),
        (["slurm", "chain", "--json", "status", "s"], "option=--json: "),
        (["train", "a", "b"], "argument=b: is one too many"),
        (["run", "all", "-p", "gsb", "8"], "parameter=gsb: did you mean gbs?"),
        (["run", "02_topolgy"], "notebook=02_topolgy: did you mean 02_topology?"),
        (["run", "all", "--study", "a b"], "study='a b': must be a plain folder name"),
        (["run", "02_topology", "--study", "new"], "has no sizing.json yet; run 01_sizing first"),
        (["run", "all", "--resume", "--fresh"], "resume=True: contradicts --fresh"),
        (["train", "nowhere/plan.json"], "plan="),
        (["train"], "plan=missing: is required"),
        (["plan", "search", "--shape", "6,64,4,32,384", "--cluster", "h200", "--gpus", "x", "--gbs", "8"], "gpus=x: "),
        (
            [
                "plan",
                "search",
                "--shape",
                "6,64,4,32,384",
                "--cluster",
                "h200",
                "--gpus",
                "4",
                "--gbs",
                "8",
                "--tp",
                "3",
            ],
            "tp=3: no tp x pp x dp with the pinned sizes makes gpus=4",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(outputs, capsys, arguments, message):
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trilane: ")]
    assert len(lines) == 1 and message in lines[0]


def test_bad_input_ends_a_process_likewise(outputs):
    arguments = [sys.executable, "-m", "trilane", "train", "a", "b"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "trilane: argument=b: is one too many\n")


def test_without_a_group_all_are_listed():
    done = subprocess.run([sys.executable, "-m", "trilane"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert set(GROUPS) <= set(done.stderr.split())
