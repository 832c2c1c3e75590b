"""The studies that the tests of the reports share: the demo, and a training on 384 GPUs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import BROWSER, SMALL, uncounted

from trilane.report import notebook
from trilane.workspace.study import Study

OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
OPTIONS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium that asks nobody for anything."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=str(BROWSER), args=OPTIONS)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo study, as of `make run`, but of a smaller model and two runs; TMPDIR has
    a long path.
    """
    outputs, temporary = tmp_path_factory.mktemp("outputs"), tmp_path_factory.mktemp("x" * 100)
    command = [sys.executable, "-m", "trilane", "run", "all", "--study", "demo", *SMALL]
    env = {**uncounted(), "TRILANE_OUTPUTS": str(outputs), "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(outputs / "demo/index.html")
    assert "50/50, loss" in done.stderr, "progress shows on the terminal"
    return outputs / "demo"


@pytest.fixture(scope="session")
def big(demo: Path) -> Path:
    """The folder of a study of 200 billion parameters on 384 GPUs, from its size to its decision,
    next to the demo.
    """
    dates = {
        "start": "2027-03-01",
        "deadline": "2027-09-01",
        "allocation": 1.5e6,
        "price": 1.5,
        "tokens": 366e9,
    }
    with mock.patch.dict(
        os.environ, {**uncounted(), "TRILANE_OUTPUTS": str(demo.parent)}, clear=True
    ):
        study = Study.create("big")
        notebook.run("01_sizing", study, choose="target")
        notebook.run("02_topology", study)
        notebook.run("07_calendar", study, **dates)
        notebook.run("08_decision", study)
    return study.folder
