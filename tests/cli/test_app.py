"""The command line as processes see it; the messages of bad input are in test_bad_input.py."""

import subprocess
import sys

import pytest

from trilane.cli.app import GROUPS, main, root


def trilane(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "trilane", *words], capture_output=True, text=True, check=False
    )


def test_bad_input_ends_a_process_with_one_line():
    done = trilane("train", "a", "b")
    assert (done.returncode, done.stderr) == (2, "trilane: argument=b: is one too many\n")


def test_a_closed_output_is_no_error():
    """As a cron job or a daemon may start a process."""
    done = subprocess.run(
        f"{sys.executable} -m trilane slurm site local >&-", shell=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_a_group_all_are_listed():
    done = trilane()
    assert (done.returncode, done.stdout) == (2, "")
    assert set(GROUPS) <= set(done.stderr.split())


def test_h_is_help_of_every_group_and_command(capsys: pytest.CaptureFixture):
    groups = [(name, root.get_command(None, name)) for name in GROUPS]
    lines = [[], *([name] for name in GROUPS)]
    lines += [[name, each] for name, group in groups for each in getattr(group, "commands", ())]
    for words in lines:
        shown = [(main([*words, flag]), capsys.readouterr().out) for flag in ("-h", "--help")]
        assert shown[0] == shown[1] and shown[0][0] == 0 and "-h, --help" in shown[0][1]


def test_a_notebook_that_lacks_an_earlier_one_is_bad_input(outputs, capsys: pytest.CaptureFixture):
    assert main(["run", "02_topology", "--study", "new"]) == 2
    assert "has no sizing.json yet; run 01_sizing first" in capsys.readouterr().err
