"""Which Python and which build of torch `make` sets up: with stand-ins of Python that print a
version.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support import REPOSITORY

STAND_IN = """#!/bin/sh
PATH=/usr/bin:/bin
case "$*" in
  *_base_executable*) echo "$0" ;;
  {lacks}) exit 1 ;;
  "-m venv"*) for dir; do :; done; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python"; touch "$dir/pyvenv.cfg" ;;
  *) {version} ;;
esac
"""


def stand_in(path: Path, version: str) -> Path:
    """A Python of that version, which "3.12.1 without *ensurepip*" says to lack; "" is pyenv's, and
    does not run.
    """
    version, _, lacks = version.partition(" without ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        STAND_IN.format(
            version=f"echo {version}" if version else "exit 127", lacks=lacks or "nothing"
        )
    )
    path.chmod(0o755)
    return path


def environment(folder: Path, version: str) -> None:
    stand_in(folder / "bin/python", version)
    (folder / "pyvenv.cfg").touch()


def make_venv(folder: Path, python: str = "", *, check: bool = False) -> tuple[int, str]:
    """Exit code and text of .ci/venv for the folder's environment, with the folder's Pythons on the
    PATH alone.
    """
    options = ["--check"] if check else []
    command = [REPOSITORY / ".ci/venv", *options, folder / "a venv", python]
    done = subprocess.run(
        command, env={"PATH": f"{folder}/bin"}, cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


TAKEN = [
    ({"python3": "3.11.7", "python3.13": "3.13.0"}, "3.11.7"),
    ({"python3": "3.15.0", "python3.13": "", "python3.12": "3.12.1"}, "3.12.1"),
]


@pytest.mark.parametrize(("there", "taken"), TAKEN)
def test_the_set_up_takes_python3_else_the_newest_that_trains_and_runs(there, taken, tmp_path):
    for name, version in there.items():
        stand_in(tmp_path / "bin" / name, version)
    assert make_venv(tmp_path, check=True) == (1, "")
    code, text = make_venv(tmp_path)
    assert code == 0 and text.startswith(f"set-up: {tmp_path}/a venv with Python {taken} ")
    assert make_venv(tmp_path, check=True) == make_venv(tmp_path) == (0, "")


REFUSED = [
    (
        {"python3": "3.10.13"},
        "",
        "PYTHON=python3: Python 3.11, 3.12 or 3.13 is needed, and this is 3.10.13, nor",
    ),
    ({"python3": "3.12.1"}, "python3.13", "PYTHON=python3.13: "),
    (
        {"python3": "3.12.1 without *ensurepip*"},
        "",
        "PYTHON=python3: it has no venv module: on Debian and Ubuntu apt",
    ),
]


@pytest.mark.parametrize(("there", "python", "rule"), REFUSED)
def test_without_a_python_that_trains_one_line_says_the_ways_on(there, python, rule, tmp_path):
    """Nothing is made or cleared before; what PYTHON names is never replaced by another."""
    environment(tmp_path / "a venv", "2.7.18")
    for name, version in there.items():
        stand_in(tmp_path / "bin" / name, version)
    code, text = make_venv(tmp_path, python)
    assert (code, rule in text, text.count("\n")) == (2, True, 1), text
    assert "make PYTHON=" in text and (tmp_path / "a venv/pyvenv.cfg").exists()


PRESENT = [
    ("3.11.2", "", ""),
    ("3.11.2", "bin/my python", "was of Python 3.11.2; made anew with Python 3.12.1"),
    ("3.10.13", "", "was of Python 3.10.13; made anew with Python 3.11.7"),
    ("3.11.7 without *pip*", "", "was not whole; made anew with Python 3.11.7"),
]


@pytest.mark.parametrize(("present", "python", "says"), PRESENT)
def test_an_environment_of_another_python_or_a_broken_one_is_made_anew(
    present, python, says, tmp_path
):
    stand_in(tmp_path / "bin/python3", "3.11.7")
    stand_in(tmp_path / "bin/my python", "3.12.1")
    environment(tmp_path / "a venv", present)
    assert make_venv(tmp_path, python, check=True)[0] == int(bool(says))
    code, text = make_venv(tmp_path, python)
    assert code == 0 and says in text and bool(text) is bool(says)


def make(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """`make` for an environment in the folder, without what the `make` of the tests was told."""
    told = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTHON", "CUDA")
    env = {name: value for name, value in os.environ.items() if name not in told}
    env["PATH"] = f"{folder}:{env['PATH']}"
    command = ["make", *words, f"VENV={folder}/venv"]
    return subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize(("cards", "build"), [("8.0\n7.0\n", "+cu126"), ("[N/A]\n", "")])
def test_the_set_up_of_a_v100_takes_the_build_of_torch_that_knows_it(
    cards: str, build: str, tmp_path
):
    """By what nvidia-smi prints of the cards; on one machine with others, too. CUDA=126 or cpu
    stays.
    """
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{cards}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert set_up(tmp_path) == build
    assert set_up(tmp_path, "CUDA=cpu") == "+cpu"
    (tmp_path / "venv").mkdir()
    stamp = tmp_path / "venv/.current126"
    stamp.touch()
    assert set_up(tmp_path) == "+cu126"
    stamp.rename(tmp_path / "venv/.currentcpu")
    assert set_up(tmp_path) == "+cpu"


def set_up(folder: Path, *words: str) -> str:
    """Which build of torch `make venv` asks for, of its index and with its lock."""
    printed = make(folder, "-n", "-B", "venv", *words).stdout
    ((build, index),) = re.findall(r" torch==[\d.]+(\S*)(?: --index-url (\S+))?", printed)
    assert index == (build and f"https://download.pytorch.org/whl/{build[1:]}")
    assert f"-r requirements-cuda{'126' if build == '+cu126' else ''}.lock" in printed
    return build
