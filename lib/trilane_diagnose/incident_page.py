"""The page of an incident."""

from pathlib import Path

from trilane.report.index import table, write_page
from trilane.utils.tables import Html
from trilane_diagnose.incident import SHOWN, Incident


def write_incident(found: Incident, path: Path) -> Path:
    """Write the incident as one page: the verdict, the timeline, the notes; its path."""
    heading = Html.of("Incident “{}”", found.folder.resolve().name)
    card = Html.of('<p class="card"><b>{}</b></p>', found.status)
    lines = (Html.pre(line) for line in found.verdict)
    # two columns, which fit on a phone
    cells = (event.cells() for event in found.events[:SHOWN])
    rows = (
        (" ".join(filter(None, c[:3])), Html.of("{:code}{}", c[3], Html.pre(c[4]))) for c in cells
    )
    notes = (Html.of("<p>{}</p>", note) for note in found.notes)
    timeline = [Html("<h2>Timeline</h2>"), table(("When and where", "What"), rows)]
    return write_page(
        path, heading, [Html.of("<h1>{}</h1>", heading), card, *lines, *timeline, *notes]
    )
