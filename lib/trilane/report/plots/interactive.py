"""Interactive figures: a Vega-Lite specification that Altair writes, with a picture of it for paper.

JupyterLab draws the specification itself; a report holds Vega's script (html.py). Why this library: docs/log.md.
"""

import base64
import functools
import hashlib
import io
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import vl_convert
from PIL import Image

from trilane.report.plots.style import COLORS

MIME = "application/vnd.vegalite.v5+json"  # the newest that JupyterLab 4.6 draws
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"  # Altair names 5.20, of which JupyterLab's 5.6 warns
VERSION = "6.4"  # of Vega-Lite in reports and pictures: the newest of vl_convert, it draws specifications of version 5
PIXELS = 2  # of the picture for each pixel of the figure
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
        from altair import data_transformers  # a third of a second, and a report needs only the specification

        with data_transformers.disable_max_rows():
            spec = chart.to_dict()
        config = {**CONFIG, **{name: value for name, value in spec.get("config", {}).items() if name != "view"}}
        self.spec: dict[str, Any] = _without_nan({**spec, "$schema": SCHEMA, "config": config, "description": text})
        self.text = text

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as it is before anybody picks, on white."""
        on_white = {**self.spec, "config": {**self.spec["config"], "background": "white"}}
        picture = vl_convert.vegalite_to_png(on_white, vl_version=VERSION, scale=PIXELS, allowed_base_urls=[])
        small = io.BytesIO()  # with a palette it takes a tenth
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
        return small.getvalue()

    def savefig(self, path: Path, **options: Any) -> None:
        """Write the picture; the options that matplotlib's figures take change nothing."""
        path.write_bytes(self.png)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {MIME: self.spec, "image/png": base64.b64encode(self.png).decode(), "text/plain": self.text}


def _without_nan(value: Any) -> Any:
    """The value with null for each number that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _without_nan(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embedded(spec: object) -> str:
    """A specification as JSON that stands in a `script` element: nothing in it can end the element."""
    text = json.dumps(spec, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@functools.cache
def script() -> tuple[str, str]:
    """Vega's script with ours, which draws the figures of a report, and its hash for a Content-Security-Policy."""
    ours = (Path(str(resources.files("trilane"))) / "data/report/charts.js").read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle(ours, vl_version=VERSION)
    return text, f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
