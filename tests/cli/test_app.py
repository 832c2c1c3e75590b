"""The command line as processes see it; the messages of bad input are in test_bad_input.py."""

import subprocess
import sys

from trilane.cli.app import GROUPS, Group, main, root


def trilane(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "trilane", *words], capture_output=True, text=True, check=False
    )


def shown_commands() -> list[list[str]]:
    """The words of every group and command that help shows."""
    commands = []
    for name in GROUPS:
        group = root.get_command(None, name)
        commands.append([name])
        if isinstance(group, Group):
            commands += [[name, each] for each, c in group.commands.items() if not c.hidden]
    return commands


def test_bad_input_ends_a_process_with_one_line():
    done = trilane("train")
    assert (done.returncode, done.stderr) == (
        2,
        "trilane: command=trilane train: Missing argument 'PLAN'.\n",
    )


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


def test_h_is_help_of_every_group_and_command(capsys):
    for words in [[], ["slurm", "job"], *shown_commands()]:
        assert main([*words, "-h"]) == 0 and "-h, --help" in capsys.readouterr().out
