"""The index of a study, and the page of all studies; text from files is never markup in them."""

import base64
import contextlib
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from trilane.analysis.collect import MeasuredRuns
from trilane.analysis.tables import TABLE, rows_of, to_html
from trilane.report.html import DATA, POLICY, read_field, read_notebook, title
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import Html, printable, short
from trilane.workspace.installation import stamp
from trilane.workspace.run_folder import write_text
from trilane.workspace.status import Status, known_status, status_problem
from trilane.workspace.study import PATIENCE_S, Study

SESSION = "-session.html"  # ends the name of a report made in a session
FLEET = "runs.html"  # the table of all runs
FIRST = "08_decision"  # what the index lists first


def write_index(study: Study) -> Path:
    """Write the study's index.html: its notebooks (the decision first), its runs with their status, its results.

    The page of all studies, index.html of the folder above, is written anew too. One process at a time does it, so that
    the last one lists what all have made.
    """
    with FolderLock([study.folder.parent], ".index.lock", "outputs").held(PATIENCE_S):
        path = _write_index(study)
        write_gallery(study.folder.parent)
    return path


def _write_index(study: Study) -> Path:
    values = {
        "study": study.name,
        "headline": headline(study),
        "notebooks": [
            _notebook_row(p) for p in sorted(study.folder.glob("*.ipynb"), key=lambda p: (p.stem != FIRST, p))
        ],
        "runs": [_run_row(folder) for folder in study.run_folders()],
        "files": [Html.link(p.name, p.name) for p in sorted(study.folder.iterdir()) if _is_result(p)],
    }
    return write_text(study.folder / "index.html", _page("index", POLICY, **values), derived=True)


def _is_result(path: Path) -> bool:
    """Whether the file is a result, the table of all runs, or a report of a session (session.py)."""
    return path.suffix in (".json", ".csv") or path.name.endswith(SESSION) or path.name == FLEET


def write_gallery(root: Path) -> Path:
    """Write index.html of the folder of all studies: a row each, the newest first, which a click on a heading sorts."""
    studies = [
        study for folder in root.iterdir() if (folder / "index.html").is_file() and (study := _study(folder.name))
    ]
    rows = [_gallery_row(study) for study in studies]
    rows.sort(key=lambda row: str(row[-1]), reverse=True)
    heads = ("study", "recommended", "notebooks completed", "runs completed", "model", "changed (UTC)")
    cells = [Html.joined("", [Html.of('<td class="text">{}</td>', cell) for cell in row]) for row in rows]
    body = Html.joined("\n", [Html.of("<tr>{}</tr>", row) for row in cells])
    titles = Html.joined("", [Html.of('<th class="text" tabindex="0" role="button">{}</th>', h) for h in heads])
    table = Html.of(TABLE, "", titles, body)
    return write_text(root / "index.html", sortable_page("Studies", table), derived=True)


def save_fleet(study: Study, runs: MeasuredRuns) -> Path:
    """Write runs.html of a study: all runs with all that `logs table` has, a table which a click on a heading sorts."""
    return write_text(
        study.folder / FLEET,
        sortable_page(f"Runs of {study.name}", to_html(rows_of(runs.ranked or runs.runs))),
        derived=True,
    )


def sortable_page(title: str, table: Html) -> str:
    """A page of one table of the class `sortable`, which a click on a heading sorts."""
    script = (DATA / "sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'"
    return _page("gallery", policy, script=Html(script), title=title, table=table)


def _study(name: str) -> Study | None:
    """The study of that name; None where a folder has a name that no study may have."""
    with contextlib.suppress(ValueError):
        return Study(name)
    return None


def _gallery_row(study: Study) -> tuple[object, ...]:
    done = [_notebook_row(path)["status"] == "completed" for path in study.folder.glob("*.ipynb")]
    runs = [known_status(folder) for folder in study.run_folders()]
    advice = read_field(study.folder / "decision.json", lambda values: values["recommendation"]["verdict"])
    cards = {str(card["label"]): card["value"] for card in headline(study)}
    model = next((value for label, value in cards.items() if label.startswith("parameters")), "")
    changed = datetime.fromtimestamp((study.folder / "index.html").stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M")
    finished = sum(status is not None and status.status is Status.COMPLETED for status in runs)
    counts = f"{sum(done)} of {len(done)}", f"{finished} of {len(runs)}"
    return Html.link(study.name, study.name, "index.html"), advice or "", *counts, model, changed


def _page(template: str, policy: str, **values: object) -> str:
    """A page of a template, with the styles, the policy and the stamp that all pages have."""
    source = (DATA / f"{template}.html.j2").read_text(encoding="utf-8")
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True, finalize=_shown).from_string(source)
    css = Html((DATA / "report.css").read_text(encoding="utf-8"))
    return made.render(css=css, policy=Html(policy), stamp=stamp(), **values)


def _shown(value: object) -> object:
    """A value of the template: Html as it is, any other one as text, which the template escapes."""
    return value if isinstance(value, Html) else printable(str(value))


def headline(study: Study) -> list[dict[str, Any]]:
    """The figures on top of the index, from decision.json and headline.json; those that exist and can be read."""
    path = study.folder / "headline.json"
    cards = (read_field(path, lambda values: list(values["cards"])) if path.exists() else []) or []
    advice = read_field(study.folder / "decision.json", lambda values: values["recommendation"])
    if isinstance(advice, dict) and advice.get("verdict"):
        cards = [{"value": advice["verdict"], "label": f"recommended by {FIRST} {advice.get('change', '')}"}, *cards]
    return [card for card in cards if isinstance(card, dict) and {"value", "label"} <= set(card)]


def _notebook_row(path: Path) -> dict[str, Any]:
    try:
        notebook = read_notebook(path)
        heading, made = title(notebook), notebook.metadata.get("papermill", {})
        seconds = f"{made['duration']:.0f}" if made.get("duration") else ""
        status = "failed" if made.get("exception") else "completed" if made.get("end_time") else "unfinished"
    except (ValueError, KeyError, TypeError, AttributeError):
        heading, seconds, status = path.stem, "", "damaged"
    page = path.with_suffix(".html")
    return {
        "title": Html.link(heading, page.name) if page.exists() else heading,
        "file": Html.link(path.name, path.name),
        "status": status,
        "seconds": seconds,
    }


def _run_row(folder: Path) -> dict[str, Any]:
    written, problem = known_status(folder), status_problem(folder)
    files = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {
        "name": folder.name,
        "status": str(written.status) if written else "unknown" if problem else "not started",
        "evidence": short(written.evidence if written else problem),
        "files": [Html.link(name, "runs", folder.name, name) for name in files],
    }
