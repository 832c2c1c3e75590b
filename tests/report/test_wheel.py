"""An installed wheel, not editable, finds its templates and notebooks away from any checkout."""

import os
import subprocess
import sys

import pytest
from support import REPOSITORY

ASK = """
from trilane.report.notebook import notebook_names
from trilane.workspace.installation import checkout, outputs_root, shipped, stamp
print(checkout(), outputs_root(), notebook_names()[0], (shipped("slurm_templates") / "parts/training").is_file())
print(stamp()["revision"])
"""


@pytest.mark.slow
def test_a_wheel_brings_its_notebooks_and_templates(tmp_path):
    pytest.importorskip("setuptools")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(
        listed, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, files):  # a copy: the build writes into its source
        if (REPOSITORY / name).exists() and not name.startswith("tests/"):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / name).write_bytes((REPOSITORY / name).read_bytes())
    words = "-m pip install -q --no-deps --no-build-isolation --no-index"
    pip = [sys.executable, *words.split()]
    subprocess.run([*pip, "--target", tmp_path / "installed", tmp_path / "source"], check=True)
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRILANE_HOME", "TRILANE_OUTPUTS")
    }
    env |= {"PYTHONPATH": f"{tmp_path}/installed"}
    (tmp_path / "here").mkdir()
    ask = [sys.executable, "-c", ASK]
    asked = subprocess.run(
        ask, cwd=tmp_path / "here", env=env, capture_output=True, text=True, check=True
    )
    first, second = asked.stdout.splitlines()
    assert first == f"None {tmp_path}/here/outputs 01_sizing True"
    assert second == "unknown (not a git checkout)"
