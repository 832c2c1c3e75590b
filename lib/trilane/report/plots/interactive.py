"""Interactive figures: a Vega-Lite specification that Altair writes, with a picture of it for
paper.
"""

import base64
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from PIL import Image

from trilane.report.plots.style import COLORS, MIME, VERSION
from trilane.utils.tables import as_json
from trilane.utils.validation import shipped_json


class Interactive:
    """A figure with tooltips, selections and controls. `text`, for screen readers: what is drawn,
    and the result.

    `data`: rows by the name that the chart has for them; those in the chart itself are copied at
    each step of it.
    """

    def __init__(self, chart: Any, text: str, **data: Sequence[Mapping[str, Any]]):
        with alt.data_transformers.disable_max_rows():
            spec = chart.to_dict()
        # Altair writes 5.20, of which JupyterLab's 5.6 warns on the console
        spec["$schema"] = "https://vega.github.io/schema/vega-lite/v5.json"
        config = shipped_json("report/figures")["config"] | {"range": {"category": list(COLORS)}}
        spec["config"] = {
            **config,
            **{name: v for name, v in spec.get("config", {}).items() if name != "view"},
        }
        self.spec: dict[str, Any] = as_json(
            {**spec, "description": text, **({"datasets": data} if data else {})}
        )
        self.text = text

    @property
    def on_white(self) -> dict[str, Any]:
        """Its specification for a picture, which has no page behind it."""
        return {**self.spec, "config": {**self.spec["config"], "background": "white"}}

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as it is before anybody picks, on white."""
        picture = vl_convert.vegalite_to_png(
            self.on_white, vl_version=VERSION, scale=2, allowed_base_urls=[]
        )
        small = io.BytesIO()
        # with a palette it takes 23 kB instead of 336
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(
            small, "PNG", optimize=True
        )
        return small.getvalue()

    @functools.cached_property
    def vega(self) -> dict[str, Any]:
        """Compiled, which takes longer than to draw it."""
        compiled: dict[str, Any] = vl_convert.vegalite_to_vega(self.on_white, vl_version=VERSION)
        return compiled

    def svg(self, signals: Mapping[str, Any], **data: Sequence[Mapping[str, Any]]) -> bytes:
        """The figure with other values of its parameters, and other rows, by the names that it has
        for them.
        """
        new = {**signals, **{name: as_json(rows) for name, rows in data.items()}}
        parts = {kind: [{**own} for own in self.vega[kind]] for kind in ("signals", "data")}
        for own, key in [
            *((d, "values") for d in parts["data"]),
            *((s, "value") for s in parts["signals"]),
        ]:
            own.update({key: new[own["name"]]} if own["name"] in new else {})
        drawn: str = vl_convert.vega_to_svg({**self.vega, **parts}, allowed_base_urls=[])
        return drawn.encode()

    def savefig(self, path: Path, **options: Any) -> None:
        """Write the picture; the options that matplotlib's figures take change nothing."""
        path.write_bytes(self.png)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {
            MIME: self.spec,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": self.text,
        }


def chart(rows: Iterable[Mapping[str, Any]] | None = None, **properties: Any) -> Any:
    """An empty chart of these rows; without them, of those of the chart that it becomes a part of."""
    made = alt.Chart() if rows is None else alt.Chart(alt.Data(values=list(rows)))
    return made.properties(**properties)


def tooltips(titles: Mapping[str, str], numbers: Mapping[str, str] | None = None) -> list[Any]:
    """A line of the tooltip for each field: its title; `numbers` are written by Vega, with commas
    and five digits.
    """
    found = [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]
    return found + [
        alt.Tooltip(f"{name}:Q", title=title, format=",.5~r")
        for name, title in (numbers or {}).items()
    ]


def rounded(value: float, digits: int = 5) -> float:
    """A number with that many significant digits: a screen shows no more, and a report stays small."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
