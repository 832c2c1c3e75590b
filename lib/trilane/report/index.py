"""The index of a study."""

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2

from trilane.report.html import DATA, POLICY, read_notebook, state, title, without_places
from trilane.utils.files import replace_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import Html, printable, short
from trilane.utils.validation import require
from trilane.workspace.installation import stamp
from trilane.workspace.status import known_status, status_problem
from trilane.workspace.study import Study


def write_index(study: Study) -> Path:
    """Write the study's index.html: its notebooks (the decision first), its runs with their status,
    its results.

    One process at a time does it, so that the last one lists what all have made.
    """
    with FolderLock([study.folder], ".index.lock", "study").held(20.0):
        notebooks = sorted(
            study.folder.glob("*.ipynb"), key=lambda path: (path.stem != "08_decision", path)
        )
        runs = [_run_row(folder) for folder in study.run_folders()]
        names = sorted(
            path.name for path in study.folder.iterdir() if path.suffix in (".json", ".csv")
        )
        parts = [
            Html.of("<h1>Study “{}”</h1>", study.name),
            Html("<h2>Notebooks</h2>"),
            table(
                ("Question", "Status", "Seconds", "Executed copy"), map(_notebook_row, notebooks)
            ),
            *[Html("<h2>Runs</h2>"), table(("Run", "Status", "Evidence", "Files"), runs)]
            * bool(runs),
            Html.of(
                "<h2>Results</h2>\n<p>{}</p>",
                Html.joined(" · ", [Html.link(name, name) for name in names]),
            ),
        ]
        return write_page(study.folder / "index.html", Html.of("Study “{}”", study.name), parts)


def write_page(path: Path, heading: Html, parts: Iterable[Html]) -> Path:
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True)
    source = made.from_string((DATA / "page.html.j2").read_text(encoding="utf-8"))
    css = Html((DATA / "report.css").read_text(encoding="utf-8"))
    values = {"policy": Html(POLICY), "title": heading, "stamp": stamp()}
    return replace_text(path, source.render(css=css, body=Html.joined("\n", parts), **values))


def zip_path(study: Study) -> Path:
    """Where the zip of a study lies, NAME.zip next to it; ValueError where anything else has that
    name.
    """
    path = study.folder.with_name(f"{study.name}.zip")
    if path.exists():
        is_zip = path.is_file() and zipfile.is_zipfile(path)
        is_own = is_zip and f"{study.name}/index.html" in zipfile.ZipFile(path).namelist()
        require(is_own, "zip", path, "exists and is no zip of this study; move it away")
    return path


def write_zip(study: Study) -> Path:
    """Write the pages of a study and all files that they link as one zip; its path.

    In order, with one date and without the machine's paths: equal studies give equal bytes.
    """
    path, aside = zip_path(study), study.folder / f".{study.name}.zip"
    folders = [study.folder, study.folder / "figures", *study.run_folders()]
    found = sorted(each for folder in folders for each in folder.glob("[!.]*"))
    with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as made:
        for file in filter(Path.is_file, found):
            data = file.read_bytes()
            if b"\0" not in data:
                text = data.decode("utf-8", "surrogateescape")
                data = without_places(text, study.folder).encode("utf-8", "surrogateescape")
            info = zipfile.ZipInfo(printable(str(file.relative_to(study.folder.parent))))
            info.external_attr = 0o644 << 16
            made.writestr(info, data, zipfile.ZIP_DEFLATED)
    return aside.replace(path)


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> Html:
    """A table of texts and Html."""
    titles = Html.joined("", (Html.of('<th class="text">{}</th>', head) for head in heads))
    lines = (
        Html.joined("", (Html.of('<td class="text">{}</td>', cell) for cell in row)) for row in rows
    )
    body = Html.joined("\n", (Html.of("<tr>{}</tr>", line) for line in lines))
    return Html.of(
        "<table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody></table>", titles, body
    )


def _notebook_row(path: Path) -> list[object]:
    """Question, status, seconds and executed copy of a notebook."""
    try:
        notebook = read_notebook(path)
        heading, status, made = (
            title(notebook),
            state(notebook),
            notebook.metadata.get("papermill", {}),
        )
        seconds = f"{made['duration']:.0f}" if made.get("duration") else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        heading, seconds, status = path.stem, "", "damaged"
    report = path.with_suffix(".html")
    question = Html.link(heading, report.name) if report.exists() else heading
    return [question, _status(status), seconds, Html.link(path.name, path.name)]


def _run_row(folder: Path) -> list[object]:
    """Name, status, its evidence, and the files of a run."""
    written, problem = known_status(folder), status_problem(folder)
    status = str(written.status) if written else "unknown" if problem else "not started"
    files = sorted(
        path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    links = Html.joined(" ", (Html.link(name, "runs", folder.name, name) for name in files))
    return [folder.name, _status(status), short(written.evidence if written else problem), links]


def _status(status: str) -> Html:
    return Html.of('<span class="status-{}">{}</span>', status, status)
