"""The editor of one plan: each field can be changed; its prediction, or the rule against it,
follows.
"""

from pathlib import Path
from typing import Any

from ipywidgets import HTML, BoundedIntText, Button, Checkbox, Dropdown, GridBox, VBox

from trilane.config.engines import ENGINES
from trilane.config.parallelism import CHOICES, LARGEST
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.shipped import constants_of
from trilane.planning.explain import use_plan, varied
from trilane.planning.search_result import Candidate
from trilane.utils.numbers import chance, with_bounds
from trilane.utils.tables import Html
from trilane.workspace.study import Study


def explore(
    base: Plan | Path | str,
    calibration: Calibration | str | None = None,
    study: Study | None = None,
) -> "Editor":
    """An editor that starts at the plan `base`: a control for each field, what is predicted, and a
    button that puts the plan first in the plans.json of `study`.

        explore(best.rows[0].plan, known, here)
    """
    base = read_plan(base)
    calibration = constants_of(base, calibration or "")
    return Editor(varied(base, calibration), calibration, study)


def sentence(base: Candidate, chosen: Candidate) -> Html:
    """The prediction of the chosen plan, relative to the base plan."""
    p = chosen.prediction
    plan = chosen.plan
    seconds = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
    change = ""
    if plan.id != base.plan.id:
        change = f", {p.sec_per_it / base.prediction.sec_per_it - 1:+.1%} against the first plan"
    words = "{:code} ({}), GPUs: {}: <b>{} s</b> an iteration{}, <b>{:.3g} GiB</b>"
    gib = p.memory_bytes / 2**30
    time = Html.of(words, plan.label, plan.id, chosen.topology.gpus, seconds, change, gib)
    risk = chance(p.oom_probability)
    return Html.of("{}, out of memory with {}; {}", time, risk, p.support.words)


def _box(name: str, value: Any) -> Any:
    """The control of a field of the plan."""
    look: Any = {"value": value, "description": name.replace("_", " "), "layout": {"width": "auto"}}
    if isinstance(value, bool):
        return Checkbox(indent=False, **look)
    look["style"] = {"description_width": "128px"}
    words = {"engine": ENGINES, **CHOICES}
    if name in words:
        return Dropdown(options=words[name], **look)
    return BoundedIntText(min=0, max=LARGEST, continuous_update=False, **look)


class Editor:
    """Controls of one plan and what follows: `boxes` by field, a `button`; `widget` shows them.

    `base` is the plan it began with, with which others are compared; `chosen` that of the controls,
    None if refused.
    """

    # Its text is in widgets of its own: ipywidgets' `interactive` prints to an Output widget, whose
    # messages to the kernel made papermill wait forever in 5 of 32 such cells (ipykernel 7.4,
    # nbclient 0.11).
    def __init__(self, base: Candidate, calibration: Calibration, study: Study | None) -> None:
        self.base = base
        self.calibration = calibration
        self.study = study
        self.chosen: Candidate | None = base
        fields = {"engine": base.plan.engine, **vars(base.topology)}
        self.boxes = {name: _box(name, value) for name, value in fields.items()}
        for box in self.boxes.values():
            box.observe(self._changed, "value")
        self.caption = HTML()
        self.message = HTML()
        self.button = Button(description="use this plan", disabled=study is None)
        self.button.on_click(lambda _: self.use())
        grid = GridBox([*self.boxes.values()])
        grid.layout.grid_template_columns = "repeat(auto-fill, minmax(250px, 1fr))"
        grid.layout.width = "100%"
        self.widget = VBox([grid, self.caption, self.button, self.message])
        self._changed()

    def use(self) -> None:
        """Put the plan first in the study's plans.json."""
        try:
            if not self.chosen or not self.study:
                raise ValueError("a refused plan cannot be used")
            path = use_plan(self.study, self.chosen, self.calibration)
        except ValueError as error:
            self.message.value = Html.of("<b>not written</b>: {}", error)
        else:
            words = "{:code} is now first in {}: 03 and 07 begin with it."
            self.message.value = Html.of(words, self.chosen.label, path.name)

    def _changed(self, _: Any = None) -> None:
        choices = {name: box.value for name, box in self.boxes.items()}
        self.message.value = ""
        try:
            self.chosen = varied(self.base.plan, self.calibration, **choices)
        except ValueError as error:
            self.chosen = None
            self.caption.value = Html.of("<b>refused</b>: {}", error)
        else:
            self.caption.value = sentence(self.base, self.chosen)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The controls; in a report without a kernel their text alone."""
        text = Html.of("<p>{}</p>", Html(self.caption.value))
        return {**self.widget._repr_mimebundle_(**options), "text/html": text}
