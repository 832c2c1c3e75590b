"""Reports on paper: a Chromium of this machine prints them to PDF."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from trilane.utils.tables import short
from trilane.utils.validation import require

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PRINTING_S = 120.0  # a page of 2 MB takes a few seconds
# Headless Chromium, https://developer.chrome.com/docs/chromium/headless; the paper is that of the page's @page
OPTIONS = ("--headless", "--disable-gpu", "--no-pdf-header-footer", "--no-first-run", "--disable-background-networking")


def find_browser() -> str:
    """The path of a Chromium; ValueError where this machine has none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    require(found is not None, "pdf", True, f"needs a browser that prints: none of {', '.join(BROWSERS)} is installed")
    assert found is not None
    return found


def print_pdf(report: Path, browser: str, seconds: float = PRINTING_S) -> Path:
    """Print a report beside itself, as NAME.pdf on A4; RuntimeError where the browser fails or takes too long."""
    made = report.with_name(f".{report.stem}.{secrets.token_hex(6)}.pdf")
    with tempfile.TemporaryDirectory(prefix="trilane-", ignore_cleanup_errors=True) as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", f"--print-to-pdf={made}"]
        # Chromium refuses to run as root in its sandbox; the page loads nothing and runs one script, by its policy
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        problem = _failure([*command, report.absolute().as_uri()], seconds)
    try:
        if problem or not made.is_file():
            raise RuntimeError(f"{browser} did not print {report.name} ({problem or 'no file'})")
        return made.replace(report.with_suffix(".pdf"))
    finally:
        made.unlink(missing_ok=True)


def _failure(command: list[str], seconds: float) -> str:
    """Run the command; why it failed, "" where it did not. After `seconds` it is ended with its children."""
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, process_group=0)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"no PDF within {seconds:.3g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        return f"exit code {code}: {short((log.read().strip().splitlines() or ['no output'])[-1])}" if code else ""
