"""What several tests need: an outputs folder of their own."""

from pathlib import Path

import pytest


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An outputs folder of this test's own."""
    folder = tmp_path / "outputs"
    monkeypatch.setenv("TRILANE_OUTPUTS", str(folder))
    return folder
