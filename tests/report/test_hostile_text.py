"""A colleague's files full of markup and scripts, through every notebook, in a real browser: text,
and nothing else.
"""

import csv
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from dumps import pyspy_text, topology, write_all
from support import REPOSITORY, in_browser, known_machine, small_cluster, uncounted

from trilane.report import notebook
from trilane.report.html import script, write_index
from trilane.report.notebook import notebook_names
from trilane.utils.validation import DATA, to_mapping
from trilane.workspace.study import Study

NAME = (
    "<img src=x onerror=pwned()> [x](javascript:pwned()) $\\frac$ `b` ![](http:)"  # also of a file
)
TEXT = f"{NAME} </td></pre><script>pwned()</script><svg onload=pwned()> https://127.0.0.1:9/x"
LINE = (
    " iteration {i:8d}/      10 | consumed samples: {c:12d} | elapsed time per iteration (ms): 800.0 | "
    "learning rate: 1.000E-04 | global batch size:     8 | lm loss: {loss:.6E} | grad norm: 1.250 |\n"
)
LOG = "".join(LINE.format(i=i, c=8 * i, loss=6 - i / 10) for i in range(1, 9))
SIZES: dict[str, Any] = {
    "gbs": 4,
    "gpus": "1,2",
    "seq_length": 32,
    "head_dim": 64,
    "target": 3e8,
    "target_gpus": 8,
}
SEARCH = {"mbs": "1", "recompute": "none", "zero": "0", "interleaving": "1", "keep": 2}


def hostile_cluster(folder: Path) -> Path:
    values = to_mapping(small_cluster())
    values["gpu"]["name"] = values["sources"]["all"] = values["name"] = TEXT
    path = folder / "machine.json"
    path.write_text(json.dumps(values))
    return path


def hostile_runs(study: Study) -> Path:
    """Next to the study's own run: a copy under a hostile name that crashed, and logs that nobody
    made with trilane.
    """
    own = next((study.folder / "runs").iterdir())
    shutil.copytree(own, own.with_name(NAME))
    for number, folder in enumerate((own, own.with_name(NAME))):
        (folder / "run.log").write_text(LOG + f"RuntimeError: {TEXT}\n")
        status = {
            "status": "crashed",
            "evidence": TEXT,
            "rank": number,
            "exit_code": 1,
            "seconds": 1.0,
        }
        (folder / "status.json").write_text(json.dumps(status))
    (own.parent / f"{NAME}.out").write_text(
        LOG + f"Traceback (most recent call last):\nRuntimeError: {TEXT}\n"
    )
    return own.parent


def hostile_dumps(folder: Path) -> Path:
    stack = (
        (f"wait {NAME}", "threading.py", 324),
        (f"all_reduce {NAME}", "torch/distributed.py", 1),
    )
    write_all(folder, {0: stack, 1: stack, 2: stack, 3: (("<module>", f"{NAME}.py", 1),)}, "text")
    topology(folder, 2, 1, 2, hosts=[TEXT, f"second {TEXT}"], gpus_per_node=2)
    (folder / f"{NAME}.txt").write_text(pyspy_text(stack))
    return folder


def hostile_restart(folder: Path) -> Path:
    """The example of a restart, its tensors renamed."""
    shutil.copytree(REPOSITORY / "lib/trilane/data/examples/restart", folder, dirs_exist_ok=True)
    for path in folder.glob("*/*.json"):
        text = path.read_text().replace(
            "embedding.layernorm", json.dumps(f"embedding.layernorm {TEXT}")[1:-1]
        )
        path.write_text(text)
    return folder / "save_805"


def hostile_rows(path: Path) -> Path:
    with (DATA / "scored.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cluster"] == "jz-a100-80g"][:6]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {**row, "row_id": f"a-{row['row_id']} {TEXT}", "table_id": TEXT, "engine": TEXT}
            )
        writer.writerow({**rows[0], "dp": TEXT})
    return path


def poisoned(value: Any, kept: tuple[str, ...]) -> Any:
    """JSON with hostile text at the end of each of its strings, but those under the
    names `kept`.
    """
    if isinstance(value, dict):
        return {name: v if name in kept else poisoned(v, kept) for name, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, kept) for v in value]
    return f"{value} {TEXT}" if isinstance(value, str) else value


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A study in which every notebook that shows other people's files ran over those of a
    colleague.
    """
    base = tmp_path_factory.mktemp("hostile")
    before = os.environ.get("TRILANE_OUTPUTS")
    os.environ["TRILANE_OUTPUTS"] = str(known_machine(base / "outputs"))
    try:
        made = Study.create("s")
        machine = str(hostile_cluster(base))
        corpus = base / f"{NAME}.txt"
        corpus.write_text(TEXT * 100)
        with mock.patch.dict(
            os.environ, uncounted(), clear=True
        ):  # tests/test_one_answer.py runs these, too
            notebook.run("01_sizing", made, cluster=machine, **SIZES)
            notebook.run("02_topology", made, **SEARCH)
            notebook.run("03_launch", made, runs=1, control=False, train=False, corpus=str(corpus))
        notebook.run("04_analyze", made, logs=str(hostile_runs(made)))
        dumps, states = hostile_dumps(base / "dumps"), hostile_restart(base / "restart")
        notebook.run(
            "05_diagnose",
            made,
            dumps=str(dumps),
            before=str(states),
            after=str(states.with_name("load_805")),
        )
        notebook.run(
            "06_backtest", made, rows=str(hostile_rows(base / "rows.csv")), leave_out="none"
        )
        with mock.patch.dict(os.environ, uncounted(), clear=True):
            notebook.run("07_calendar", made, runs=200)
        path = made.folder / "calendar.json"
        calendar = poisoned(json.loads(path.read_text()), ("made_by", "plan_json", "request"))
        for stop in calendar["request"]["risks"]["stops"]:
            stop |= {name: f"{stop[name]} {TEXT}" for name in ("name", "source")}
        path.write_text(json.dumps(calendar))
        notebook.run("08_decision", made, title=TEXT)
        (made.folder / f"{NAME}.csv").touch()
        (made.folder / f"javascript:pwned() {NAME}.ipynb").write_text(json.dumps({"cells": TEXT}))
        write_index(made)
        yield made
    finally:
        os.environ.pop("TRILANE_OUTPUTS")
        os.environ.update({"TRILANE_OUTPUTS": before} if before else {})


PLAIN = "html head meta title style body nav main div span h1 h2 h3 p ul ol li a b br code details em footer img mark "
PLAIN += "pre strong summary dd dl dt figure table thead tbody tr th td wbr"
# What a figure's script draws is not the page's own; of scripts a page has that one and the
# figures' data.
LOOK = """() => ({
  tags: [...new Set([...document.querySelectorAll("*:not(.chart .drawing *, script)")].map(e => e.localName))],
  scripts: [...document.scripts].filter(s => s.type !== "application/json").map(s => s.textContent),
  attributes: [...new Set([...document.querySelectorAll("*")].flatMap(e => e.getAttributeNames()))],
  images: [...document.images].map(i => [i.src.split(",")[0], i.naturalWidth]),
  links: [...document.links].map(a => a.href),
  pwned: window.pwned_times || 0,
  text: document.body.textContent,
})"""


def opened(browser: Any, page_file: Path) -> dict[str, Any]:
    """What the browser finds in a page without its policy, what it printed, and what else it
    asked for.
    """
    context = browser.new_context(bypass_csp=True)
    page, seen = context.new_page(), []
    page.add_init_script(
        "window.pwned = () => { window.pwned_times = (window.pwned_times || 0) + 1; }"
    )
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: seen.append(request.url[:400]))
    page.goto(page_file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found = page.evaluate(LOOK)
    context.close()
    return {**found, "seen": [url for url in seen if not url.startswith("data:image/")]}


@in_browser
def test_hostile_text_is_text_in_every_report_in_a_browser(study: Study, browser: Any):
    """Without the policy of its pages: the escaping alone holds."""
    pages = sorted(study.folder.glob("*.html"))
    assert [page.stem for page in pages] == [*notebook_names()[:8], "index"]
    for page_file in pages:
        found = opened(browser, page_file)
        assert found["seen"] == [page_file.as_uri()], page_file.name
        assert not found["pwned"], page_file.name
        assert not [name for name in found["attributes"] if name.startswith("on")], page_file.name
        assert set(found["tags"]) <= {*PLAIN.split()}, page_file.name
        assert set(found["scripts"]) <= {script()[0]}, page_file.name
        assert {start for start, _ in found["images"]} <= {"data:image/png;base64"}
        assert all(width > 0 for _, width in found["images"]), page_file.name
        assert all(link.startswith(study.folder.as_uri()) for link in found["links"]), (
            page_file.name
        )
        text = found["text"].replace("\\\\", "\\")  # 03 shows it in a plan.json
        # those show no whole name
        if page_file.stem not in ("02_topology", "06_backtest", "07_calendar"):
            assert " ".join(NAME.split()) in " ".join(text.split()), page_file.name
