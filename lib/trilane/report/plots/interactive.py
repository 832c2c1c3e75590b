"""Interactive figures: a Vega-Lite specification that Altair writes, with a picture of it for paper."""

import base64
import functools
import hashlib
import io
import json
import textwrap
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import vl_convert

from trilane.report.plots.style import COLORS
from trilane.utils.tables import as_json

MIME = "application/vnd.vegalite.v5+json"  # the newest that JupyterLab 4.6 draws
# The newest Vega-Lite of vl_convert, for reports and pictures: it draws specifications of version 5 without a warning.
VERSION = "6.4"
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": 'system-ui, "DejaVu Sans", sans-serif',
    "range": {"category": list(COLORS)},
    "view": {"stroke": None, "continuousWidth": 400, "continuousHeight": 240},
    "axis": {"gridColor": "#e3e8ec", "domainColor": "#8fa3b3", "tickColor": "#8fa3b3", "labelLimit": 220},
    "title": {"anchor": "start", "fontSize": 13},
    "legend": {"labelLimit": 260, "symbolLimit": 40},
    "mark": {"tooltip": True},
}


class Interactive:
    """A figure with tooltips, selections and controls. `text`, for screen readers: what is drawn, and the result."""

    def __init__(self, chart: Any, text: str):
        from altair import data_transformers  # a third of a second, which reports of figures that exist do not need

        with data_transformers.disable_max_rows():
            spec = chart.to_dict()
        # Altair writes 5.20, of which JupyterLab's 5.6 warns on the console
        spec["$schema"] = "https://vega.github.io/schema/vega-lite/v5.json"
        spec["config"] = {**CONFIG, **{name: v for name, v in spec.get("config", {}).items() if name != "view"}}
        self.spec: dict[str, Any] = as_json({**spec, "description": text})
        self.text = text

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as it is before anybody picks, on white."""
        from PIL import Image

        white = {**self.spec, "config": {**self.spec["config"], "background": "white"}}
        picture = vl_convert.vegalite_to_png(white, vl_version=VERSION, scale=2, allowed_base_urls=[])
        small = io.BytesIO()
        # with a palette it takes 23 kB instead of 336
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
        return small.getvalue()

    def savefig(self, path: Path, **options: Any) -> None:
        """Write the picture; the options that matplotlib's figures take change nothing."""
        path.write_bytes(self.png)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {MIME: self.spec, "image/png": base64.b64encode(self.png).decode(), "text/plain": self.text}


def chart(rows: Iterable[Mapping[str, Any]] | None = None, **properties: Any) -> Any:
    """An empty chart of these rows; without them, of those of the chart that it becomes a part of."""
    import altair as alt

    made = alt.Chart() if rows is None else alt.Chart(alt.Data(values=list(rows)))
    return made.properties(**properties)


def tooltips(titles: Mapping[str, str], numbers: Mapping[str, str] | None = None) -> list[Any]:
    """A line of the tooltip for each field: its title; `numbers` are written by Vega, with commas and five digits."""
    import altair as alt

    found = [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]
    return found + [alt.Tooltip(f"{name}:Q", title=title, format=",.5~r") for name, title in (numbers or {}).items()]


def card(rows: Any, picked: Any, lines: int, width: int = 400) -> Any:
    """The field `card` of the picked row, a text of several lines."""
    import altair as alt

    text = rows.transform_filter(picked).mark_text(align="left", baseline="top", lineBreak="\n", lineHeight=16)
    text = text.encode(x=alt.value(0), y=alt.value(4), text="card:N", tooltip=alt.value(None))
    return text.properties(width=width, height=16 * lines + 8)


def wrapped(lines: Iterable[str]) -> str:
    """The lines as the text of a card, on a telephone too."""
    # 46 characters of 12 pixels have the width of a telephone
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 46, subsequent_indent="   ") or [""])


def axis_name(expression: str) -> Any:
    """The name of the x axis where it depends on a control: the title of an axis is fixed, that of a chart is not."""
    import altair as alt

    return alt.TitleParams(alt.expr(expression), orient="bottom", anchor="middle", fontSize=11, fontWeight="normal")


def rounded(value: float, digits: int = 5) -> float:
    """A number with that many significant digits: a screen shows no more, and a report stays small."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def embedded(spec: object) -> str:
    """A specification as JSON that stands in a `script` element: nothing in it can end the element."""
    text = json.dumps(spec, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@functools.cache
def script() -> tuple[str, str]:
    """Vega's script with ours, which draws the figures of a report, and its source for a Content-Security-Policy."""
    ours = (Path(str(resources.files("trilane"))) / "data/report/charts.js").read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle(ours, vl_version=VERSION)
    return text, f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
