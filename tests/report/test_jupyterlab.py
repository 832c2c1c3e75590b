"""A person in JupyterLab: notebooks run top to bottom, and every control is used, in a real
browser.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import IN_BROWSER, uncounted, wait_until

from trilane.workspace.run import write_text

pytestmark = [*IN_BROWSER, pytest.mark.xdist_group("demo")]


@pytest.fixture(scope="module")
def lab(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the JupyterLab that `trilane run all --lab` opens, on loopback, over copies in
    the study.
    """
    base = tmp_path_factory.mktemp("lab")
    log = base / "lab.log"
    server = {"open_browser": False, "ip": "127.0.0.1", "port": 0, "allow_root": True}
    app, token = {"expose_app_in_browser": True}, {"token": "test"}
    write_text(
        base / "config/jupyter_lab_config.json",
        json.dumps({"ServerApp": server, "LabApp": app, "IdentityProvider": token}),
    )
    words = f"-m trilane run all --lab --study {demo.name} -p leave_out none"
    command = [sys.executable, *words.split()]
    environment = {
        **uncounted(),
        "TRILANE_OUTPUTS": str(demo.parent),
        "JUPYTER_CONFIG_DIR": f"{base}/config",
        "JUPYTERLAB_SETTINGS_DIR": f"{base}/settings",
        "JUPYTERLAB_WORKSPACES_DIR": f"{base}/workspaces",
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, cwd=base, process_group=0
        )
    try:
        address = r"(http://127\.0\.0\.1:\d+)/lab"
        wait_until(
            lambda: re.search(address, log.read_text()) is not None, 60, f"no JupyterLab: {log}"
        )
        found = re.search(address, log.read_text())
        assert found
        yield found[1]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.fixture(scope="module")
def page(lab: str, browser: Any) -> Any:
    """A page of the browser, while JupyterLab runs; `page.errors` is what its console says is
    wrong.
    """
    made = browser.new_page(viewport={"width": 1400, "height": 1000})
    made.errors, made.elsewhere = [], []
    made.on("console", lambda said: made.errors.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: made.errors.append(str(error)))
    made.on(
        "request",
        lambda r: (
            made.elsewhere.append(r.url) if not r.url.startswith((lab, "data:", "blob:")) else None
        ),
    )
    return made


# The code cells of the notebook in front: whether each was executed, and its error.
CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(
  cell => cell.cell_type === "code" && cell.source.length).map(cell => [
    cell.execution_count, cell.outputs.filter(out => out.output_type === "error").map(out => out.evalue)])"""
OPEN = """async name => {
  const app = window.jupyterapp, kernel = () => app.shell.currentWidget?.sessionContext?.session?.kernel;
  await app.commands.execute("docmanager:open", {path: name});
  while (kernel()?.status !== "idle" || kernel()?.connectionStatus !== "connected")
    await new Promise(done => setTimeout(done, 100));
  app.commands.execute("notebook:run-all-cells");
}"""


def use_every_control(page: Any) -> int:
    """Choose, type and click in each control of the notebook's output; how many there were."""
    kinds = {
        ".widget-dropdown select, .vega-bind select": lambda c: c.select_option(
            index=c.locator("option").count() - 1
        ),
        ".vega-bind input[type=range]": lambda c: c.fill(c.get_attribute("max")),
        ".widget-text input": lambda c: (c.fill("2"), c.press("Enter")),
        "button.jupyter-button": lambda c: c.click(),
    }
    front = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    for more in front.get_by_text("more", exact=True).all():
        more.click()
    controls = [
        (c, use) for kind, use in kinds.items() for c in front.locator(kind).all() if c.is_visible()
    ]
    for control, use in controls:
        control.scroll_into_view_if_needed()
        use(control)
    return len(controls)


def test_notebooks_run_in_jupyterlab_and_so_does_each_of_their_controls(lab: str, page: Any):
    """One after another in a study, as Run > Run All Cells does: no error, nothing asked of anybody
    else.

    One with controls and one without; every notebook runs without a browser in another test.
    """
    page.goto(f"{lab}/lab?token=test&reset")
    page.wait_for_selector("#jp-main-dock-panel", timeout=60_000)

    def done() -> bool:
        cells = page.evaluate(CELLS)
        errors = [errors for _, errors in cells if errors]
        assert not errors, f"{page.title()}: {errors}"
        return all(count for count, _ in cells)

    used = dict[str, int]()
    for name in ("02_topology", "04_analyze"):
        page.evaluate(OPEN, f"{name}.ipynb")
        wait_until(done, 400, f"{name} did not run to its end")
        used[name] = use_every_control(page)
        wait_until(done, 60, f"{name} after its controls were used")
    assert used["02_topology"] >= 10
    assert not page.errors and not page.elsewhere
