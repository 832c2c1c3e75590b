"""Children start safely in any folder; a port that one was promised reaches it; a launcher may open
enough files.
"""

import errno
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import REPOSITORY, plant_modules

from trilane.utils.process import held_port, python, run


def started() -> tuple[set[str], set[str]]:
    """The modules that lib and the job scripts start as `python -m`, and the other programs that
    lib runs.
    """
    files = [*REPOSITORY.glob("lib/trilane/**/*.py"), *REPOSITORY.glob("slurm_templates/**/*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    modules = re.findall(r"""["\s]-m(?:",)? "?([a-z_]\w*[\w.]+)""", text)
    return set(modules), set(re.findall(r'(?:run|call|command =|git =)\(? ?\["([a-z-]+)"', text))


def test_no_command_of_lib_or_a_job_script_runs_what_lies_in_the_current_folder(
    tmp_path,
):
    """Neither modules nor programs, though PATH and PYTHONPATH have entries that mean the current
    folder.
    """
    modules, programs = started()
    assert {"trilane", "trilane_engine.torchrun", "jupyterlab"} <= modules and {
        "git",
        "scontrol",
    } <= programs
    trace = plant_modules(tmp_path)
    for name in programs | {"py-spy", "python"}:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >>{trace}\n")
        (tmp_path / name).chmod(0o755)
    hostile = {"PATH": f".::{os.environ['PATH']}", "PYTHONPATH": f":.:{REPOSITORY / 'lib'}"}
    commands = [python("-m", name, "--help") for name in modules] + [
        [name, "--version"] for name in programs
    ]
    with ThreadPoolExecutor(2) as pool:
        done = list(
            pool.map(lambda words: run(words, hostile, cwd=tmp_path, within_s=120), commands)
        )
    assert not trace.exists(), trace.read_text()
    assert not [d.stderr for d in done if "No module named" in d.stderr or d.returncode == 124]


def test_a_held_port_goes_to_nobody_but_the_store_that_it_was_held_for():
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE
        server = socket.create_server(("127.0.0.1", port))  # with SO_REUSEADDR, as torch's store
    with server, socket.create_connection(("127.0.0.1", port)):
        pass
