"""The demo study that the tests of the reports share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo study, run once with its defaults, as `make run` runs it."""
    outputs = tmp_path_factory.mktemp("outputs")
    command = [sys.executable, "-m", "trilane", "run", "all", "--study", "demo"]
    env = {**os.environ, "TRILANE_OUTPUTS": str(outputs)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(outputs / "demo/index.html")
    assert "50/50, loss" in done.stderr, "progress shows on the terminal"
    return outputs / "demo"
