"""A person in JupyterLab: a notebook runs top to bottom with its default parameters, in a real browser."""

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

from trilane.workspace.run_folder import write_text

pytestmark = [*IN_BROWSER, pytest.mark.xdist_group("demo")]


@pytest.fixture(scope="module")
def lab(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the JupyterLab that `trilane run all --lab` opens, on loopback, over copies in the study."""
    base = tmp_path_factory.mktemp("lab")
    log = base / "lab.log"
    server = {"open_browser": False, "ip": "127.0.0.1", "port": 0, "allow_root": True}
    app, token = {"expose_app_in_browser": True}, {"token": "test"}
    write_text(
        base / "config/jupyter_lab_config.json",
        json.dumps({"ServerApp": server, "LabApp": app, "IdentityProvider": token}),
    )
    command = [sys.executable, "-m", "trilane", "run", "all", "--lab", "--study", demo.name]
    environment = {
        **uncounted(),
        "TRILANE_OUTPUTS": str(demo.parent),
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(base / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(base / "workspaces"),
    }
    environment.pop("TRILANE_BATCH", None)
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, cwd=base, process_group=0)
    try:
        address = r"(http://127\.0\.0\.1:\d+)/lab"
        wait_until(lambda: re.search(address, log.read_text()) is not None, 60, f"no JupyterLab: {log}")
        found = re.search(address, log.read_text())
        assert found
        yield found[1]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.fixture(scope="module")
def page(lab: str, browser: Any) -> Any:
    """A page of the browser, while JupyterLab runs; `page.errors` is what its console says is wrong."""
    made = browser.new_page(viewport={"width": 1400, "height": 1000})
    made.errors, made.elsewhere = [], []
    made.on("console", lambda said: made.errors.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: made.errors.append(str(error)))
    made.on(
        "request", lambda r: made.elsewhere.append(r.url) if not r.url.startswith((lab, "data:", "blob:")) else None
    )
    return made


def code_cells(page: Any) -> list[dict[str, Any]]:
    """The code cells of the notebook in front, as JupyterLab holds them now."""
    cells = page.evaluate("window.jupyterapp.shell.currentWidget.content.model.toJSON().cells")
    return [cell for cell in cells if cell["cell_type"] == "code"]


def use_every_control(page: Any) -> int:
    """Choose, type and click in each control of the notebook's output; how many there were."""
    kinds = {
        ".widget-dropdown select, .vega-bind select": lambda c: c.select_option(index=c.locator("option").count() - 1),
        ".widget-checkbox input, .vega-bind input[type=checkbox]": lambda c: c.click(),
        ".widget-text input": lambda c: (c.fill("2"), c.press("Enter")),
        "button.jupyter-button": lambda c: c.click(),
    }
    controls = [(c, use) for kind, use in kinds.items() for c in page.locator(f".jp-Notebook :is({kind})").all()]
    for control, use in controls:
        control.scroll_into_view_if_needed()
        use(control)
    return len(controls)


def test_a_notebook_with_controls_runs_top_to_bottom_in_jupyterlab(lab, page):
    """Run > Run All Cells, as a person would, then every control: no error, nothing asked of anybody else."""
    page.goto(f"{lab}/lab/tree/02_topology.ipynb?token=test&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"{kernel}?.status === 'idle' && {kernel}?.connectionStatus === 'connected'")
    page.click("text=Run >> nth=0")
    page.click("text=Run All Cells >> nth=0")

    def done() -> bool:
        cells = code_cells(page)
        errors = [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
        assert not errors, f"{errors[0]['ename']}: {errors[0]['evalue']}"
        return all(cell["execution_count"] for cell in cells)

    wait_until(done, 400, "it did not run to its end")
    assert use_every_control(page) >= 10
    wait_until(done, 60, "after its controls were used")
    assert not page.errors and not page.elsewhere
