"""Printing: a browser that is missing, fails or hangs is a clear line; the PDF appears whole or not at all."""

from pathlib import Path

import pytest

from trilane.cli.app import main
from trilane.report.pdf import find_browser, print_pdf

PRINTS = 'for a in "$@"; do case $a in --print-to-pdf=*) echo "%PDF" >"${a#*=}";; esac; done'


def browser(folder: Path, script: str) -> str:
    """A browser that does what the script says."""
    path = folder / "chromium"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_report_is_printed_next_to_itself(tmp_path: Path) -> None:
    assert print_pdf(tmp_path / "01 x.html", browser(tmp_path, PRINTS)).read_text() == "%PDF\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["01 x.pdf", "chromium"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"{PRINTS}; echo no display >&2; exit 7", "exit code 7: no display"),
        ("exit 0", "no file"),
        (f"{PRINTS}; sleep 60 & sleep 60", "no PDF within 0.2 s"),
    ],
)
def test_a_browser_that_fails_leaves_no_half_of_a_pdf(tmp_path: Path, script: str, reason: str) -> None:
    (tmp_path / "x.pdf").write_text("an earlier one")
    with pytest.raises(RuntimeError, match=rf"did not print x\.html \({reason}\)$"):
        print_pdf(tmp_path / "x.html", browser(tmp_path, script), seconds=0.2 if "sleep" in script else 30.0)
    assert (tmp_path / "x.pdf").read_text() == "an earlier one" and len(list(tmp_path.iterdir())) == 2


def test_without_a_browser_nothing_runs(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(outputs))
    assert main(["run", "09_compare", "--study", "s", "--pdf"]) == 2
    assert capsys.readouterr().err.startswith("trilane: pdf=True: needs a browser that prints: none of chromium, ")
    assert not (outputs / "s").exists()
    browser(outputs, PRINTS)
    assert find_browser() == str(outputs / "chromium")
