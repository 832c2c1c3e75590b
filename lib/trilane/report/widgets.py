"""The instrument of a search: the controls of one plan, and under them the figure that follows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipywidgets import HTML, Accordion, BoundedIntText, Button, Dropdown, GridBox, Output, VBox

from trilane.config.engines import ENGINES
from trilane.config.parallelism import CHOICES, LARGEST
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.shipped import constants_of
from trilane.planning.explain import explain, varied
from trilane.planning.search_result import Candidate, SearchResult
from trilane.planning.space import divisors
from trilane.report.plots.explorer import PLANS, explorer, plan_row, shown_plans
from trilane.report.plots.style import MIME
from trilane.utils.tables import Html, Json
from trilane.utils.validation import shipped_json

# the controls that are always there; the others are behind "more"
FIRST = ("engine", "gpus", "tp", "pp", "mbs", "zero", "recompute", "interleaving")
# For JupyterLab: a style by which refused choices are grey; a script that asks for the figure once
# its controls are on the page, as Vega looks for them there, and lets ipywidgets hear, by events
# that bubble, what Vega does to them; a transparent pixel
PAGE = shipped_json("report/widgets")


def explore(
    base: SearchResult | Plan | Path | str,
    calibration: Calibration | str | None = None,
    tokens: float = 0.0,
) -> "Editor":
    """The explorer of a search, or of one plan, with a control for each field of the picked
    plan.

        instrument = explore(found, known)
        instrument.chosen.plan.save("plan.json")    which 07 and all commands take
    """
    if isinstance(base, SearchResult):
        plans = shown_plans(base)
        known = constants_of(plans[0].plan, calibration or "")
    else:
        base = read_plan(base)
        known = constants_of(base, calibration or "")
        plans = [varied(base, known)]
    return Editor(plans, known, tokens)


def fields_of(plan: Plan) -> dict[str, Any]:
    """What the controls set: dp follows from the GPUs."""
    values = {"engine": plan.engine, "gpus": plan.gpus, **vars(plan.topology)}
    del values["dp"]
    return values


def _grid(boxes: list[Any], least: int) -> Any:
    """Controls side by side, each at least so many pixels wide with its label."""
    grid = GridBox(boxes)
    grid.add_class("trilane-grid")
    grid.layout.grid_template_columns = f"repeat(auto-fit, minmax({least}px, 1fr))"
    return grid


class Editor:
    """Controls of one plan and what follows: `boxes` by field, `picks` by parameter of the
    `figure`; `widget` shows them.

    `base` is the plan it began with, `chosen` that of the controls, None if refused.
    """

    # Outputs that are set send nothing to the kernel. What is printed to an Output widget does, and
    # made papermill wait forever in 5 of 32 such cells (ipykernel 7.4, nbclient 0.11).
    def __init__(
        self,
        plans: Sequence[Candidate],
        calibration: Calibration,
        tokens: float,
    ) -> None:
        self.base = plans[0]
        self.calibration = calibration
        self.tokens = tokens
        self.is_busy = True  # the controls are set by the program
        self.figure = explorer(plans, tokens)
        self.rows = {row["id"]: row for row in self.figure.spec["datasets"]["plans"]}
        self.plans = {candidate.plan.id: candidate for candidate in plans}
        self.picks: dict[str, Any] = {}
        for param in self.figure.spec["params"]:
            look = param.get("bind", {})
            if "options" in look:
                box = Dropdown(options=look["options"], description=look["name"])
                box.add_class(f"pick-{box.model_id}")
                self.picks[param["name"]] = box
                if param["name"] in ("a", "b"):
                    box.value = param["value"]
        self.picks["plan"].observe(self._picked, "value")
        self.values = fields_of(self.base.plan)
        self.boxes: dict[str, Any] = {}
        choices = self._choices()
        for name, value in self.values.items():
            if name in choices:
                box = Dropdown(options=[value])
            else:
                box = BoundedIntText(value, max=LARGEST, continuous_update=False)
            box.description = name.replace("_", " ")
            box.observe(self._changed, "value")
            self.boxes[name] = box
        self.caption = HTML()
        self.link = Button(layout={"display": "none"})
        self.link.add_class("trilane-link")
        self.link.on_click(lambda _: self._draw())
        self.picture = Output(outputs=_outputs({MIME: self.figure.spec}))
        self.picture.layout.min_height = "830px"  # so that a page stays where it is
        self.widget = self._laid_out()
        self._show(is_drawn=False)

    def _laid_out(self) -> Any:
        """The controls above the figure."""
        first = [self.boxes[name] for name in FIRST]
        rest = [box for name, box in self.boxes.items() if name not in FIRST]
        plans = [self.picks[name] for name in PLANS]
        filters = [box for name, box in self.picks.items() if name not in PLANS]
        script = Output(outputs=_outputs({"application/javascript": PAGE["script"]}))
        more = Accordion([_grid(rest, 300)], titles=["more"])
        above = [HTML(PAGE["style"]), script, _grid(first, 230), more]
        below = [_grid(plans, 300), _grid(filters, 185), self.picture]
        return VBox([*above, self.caption, *below, self.link])

    def _choices(self) -> dict[str, list[Any]]:
        """The values of the fields that are chosen; the others are typed."""
        values = self.values
        sizes = divisors(values["gpus"])
        layers = self.base.plan.shape.num_layers
        choices = {"engine": ENGINES, **CHOICES, "zero": range(4), "tp": sizes, "pp": sizes}
        choices |= {"mbs": divisors(values["gbs"]), "interleaving": divisors(layers)}
        choices |= {
            name: (False, True) for name, value in values.items() if isinstance(value, bool)
        }
        return {name: [*dict.fromkeys([*some, values[name]])] for name, some in choices.items()}

    def _choice(self, name: str, value: Any) -> tuple[str, Any]:
        """A value of a field and its text, which has the rule that refuses it."""
        text = str(value)
        if value != self.values[name]:
            try:
                varied(self.base.plan, self.calibration, **{**self.values, name: value})
            except ValueError as error:
                text = f"{value} refused: {error}"
        return text, value

    def _changed(self, _: Any) -> None:
        if not self.is_busy:
            self.values = {name: box.value for name, box in self.boxes.items()}
            self._show(is_drawn=True)

    def _picked(self, _: Any) -> None:
        if not self.is_busy:
            picked = [*self.plans.values()][self.picks["plan"].index]
            self.values = fields_of(picked.plan)
            self._show(is_drawn=False)  # the browser has drawn it

    def _show(self, is_drawn: bool) -> None:
        """Let everything follow the fields' values."""
        self.is_busy = True
        self.chosen: Candidate | None = None
        try:
            self.chosen = varied(self.base.plan, self.calibration, **self.values)
        except ValueError as error:
            self.caption.value = Html.of("<b>refused</b>: {}", error)
        else:
            plan = self.chosen.plan
            key = plan.id
            why = " ".join(explain(plan, self.calibration))
            self.caption.value = Html.of("{:code} ({}). {}", plan.label, key, why)
            if "whole" not in self.rows.get(key, {}):
                self.rows[key] = plan_row(self.chosen, self.tokens)
                self.plans[key] = self.chosen
                is_drawn = True
        if is_drawn:
            self._draw()
        choices = self._choices()
        for name, box in self.boxes.items():
            with box.hold_sync():  # one message a control
                if name in choices:
                    box.options = [self._choice(name, value) for value in choices[name]]
                box.value = self.values[name]
        self.is_busy = False

    def _draw(self) -> None:
        """Draw the plans so far, the chosen one as picked, under our controls."""
        names = [row["key"] for row in self.rows.values()]
        name = self.rows[self.chosen.plan.id]["key"] if self.chosen else None
        values = {"plan": name, "a": self.picks["a"].value, "b": self.picks["b"].value}
        for which, value in values.items():
            self.picks[which].options = names
            self.picks[which].value = value
        elements = {which: f".pick-{box.model_id} select" for which, box in self.picks.items()}
        spec = self.figure.bound([*self.rows.values()], elements)
        self.picture.outputs = ()  # or nothing would follow where the specification is the last one
        # without a picture JupyterLab makes one, which takes as long as the drawing
        self.picture.outputs = _outputs({MIME: spec, "image/png": PAGE["pixel"]})

    def _repr_mimebundle_(self, **options: Any) -> Json:
        """The controls and the figure; in a report without a kernel the figure with its own."""
        return {**self.widget._repr_mimebundle_(**options), **self.figure._repr_mimebundle_()}


def _outputs(data: dict[str, Any]) -> Any:
    """What an Output widget shows, by MIME type."""
    return ({"output_type": "display_data", "data": data, "metadata": {}},)
