"""Interactive figures: a Vega-Lite specification that Altair writes, with a picture of it for
paper.
"""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from PIL import Image

from trilane.report.plots.style import COLORS, MIME, VERSION
from trilane.utils.tables import as_json
from trilane.utils.validation import shipped_json

Rows = Sequence[Mapping[str, Any]]


class Interactive:
    """A figure with tooltips, selections and controls. `text`, for screen readers: what is drawn,
    and the result.

    `data`: rows by the name that the chart has for them; those in the chart itself are copied at
    each step of it.
    """

    def __init__(self, chart: Any, text: str, **data: Rows):
        with alt.data_transformers.disable_max_rows():
            spec = chart.to_dict()
        # Altair writes 5.20, of which JupyterLab's 5.6 warns on the console
        spec["$schema"] = "https://vega.github.io/schema/vega-lite/v5.json"
        own = spec.get("config", {})
        own.pop("view", None)
        config = shipped_json("report/figures")["config"]
        spec["config"] = {**config, "range": {"category": list(COLORS)}, **own}
        spec |= {"description": text, "datasets": data}
        self.spec: dict[str, Any] = as_json(spec)
        self.text = text

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as it is before anybody picks, on white."""
        config = {**self.spec["config"], "background": "white"}
        options: Any = {"vl_version": VERSION, "allowed_base_urls": [], "scale": 2}
        drawn = vl_convert.vegalite_to_png({**self.spec, "config": config}, **options)
        picture = Image.open(io.BytesIO(drawn)).convert("RGB")
        small = io.BytesIO()
        # with a palette it takes 23 kB instead of 336
        picture.quantize(256).save(small, "PNG", optimize=True)
        return small.getvalue()

    def savefig(self, path: Path, **options: Any) -> None:
        """Write the picture; the options that matplotlib's figures take change nothing."""
        path.write_bytes(self.png)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {
            MIME: self.spec,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": self.text,
        }


def tooltips(titles: Mapping[str, str]) -> list[Any]:
    """A line of the tooltip for each field: its title."""
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]
