"""The study that the tests of the reports share: the demo."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import BROWSER, SMALL, uncounted

OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
OPTIONS += " --disable-background-networking --disable-component-update"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium that asks nobody for anything."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=str(BROWSER), args=OPTIONS.split())
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
    assert done.stdout.strip() == f"{outputs}/demo/index.html"
    assert "50/50, loss" in done.stderr, "progress shows on the terminal"
    return outputs / "demo"
