"""The editor of one plan: each field can be changed; its prediction and figures, or the rule
against it, follow.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ipywidgets import (
    HTML,
    BoundedIntText,
    Button,
    Checkbox,
    Dropdown,
    GridBox,
    Image,
    SelectionSlider,
    VBox,
)

from trilane.config.engines import ENGINES
from trilane.config.parallelism import CHOICES, LARGEST
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.shipped import constants_of
from trilane.planning.explain import use_plan, varied
from trilane.planning.search_result import Candidate
from trilane.planning.space import divisors
from trilane.report.plots.explorer import compared, svg_of
from trilane.utils.numbers import chance, with_bounds
from trilane.utils.tables import Html
from trilane.workspace.study import Study


def explore(
    base: Plan | Path | str,
    calibration: Calibration | str | None = None,
    study: Study | None = None,
) -> "Editor":
    """An editor that starts at the plan `base`: a control for each field, what is predicted, and,
    with a `study`, a button that puts the plan first in its plans.json.

        explore(best.rows[0].plan, known, here)
    """
    base = read_plan(base)
    calibration = constants_of(base, calibration or "")
    return Editor(varied(base, calibration), calibration, study)


def sentence(
    base: Candidate, calibration: Calibration, **choices: Any
) -> tuple[Html, Candidate | None]:
    """The prediction of the plan with other choices, as HTML, and the plan; where it is refused the
    rule, and None.
    """
    try:
        chosen = varied(base.plan, calibration, **choices)
    except ValueError as error:
        return Html.of("<b>refused</b>: {}", error), None
    p, plan, gpus = chosen.prediction, chosen.plan, chosen.topology.gpus
    change = f", {p.sec_per_it / base.prediction.sec_per_it - 1:+.1%} against the first plan"
    text = "{:code} ({}) on {} GPU{}: <b>{} s</b> an iteration{}, <b>{:.3g} GiB</b>, out of memory with {}; {}"
    seconds, change = (
        with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi),
        change * (plan.id != base.plan.id),
    )
    memory = (p.memory_bytes / 2**30, chance(p.oom_probability), p.support.words)
    return Html.of(
        text, plan.label, plan.id, gpus, "s" * (gpus > 1), seconds, change, *memory
    ), chosen


def sizes(plan: Plan) -> dict[str, list[int]]:
    """The values that a size of the plan's topology can have at all, in their order; for its words
    see CHOICES.
    """
    shape, t, node = plan.shape, plan.topology, plan.cluster.gpus_per_node
    layers, batch = (
        range(1, shape.num_layers + 1),
        [n for n in divisors(t.gbs) if n <= plan.cluster.max_gpus],
    )
    each = {"tp": shape.num_attention_heads, "cp": shape.seq_length}
    found = {name: [n for n in divisors(number) if n <= node] for name, number in each.items()}
    found |= {
        "dp": batch,
        "mbs": batch,
        "zero": [*range(4)],
        "interleaving": divisors(shape.num_layers),
    }
    found |= {
        "pp": [
            *divisors(shape.num_layers),
            *(n for n in divisors(shape.num_layers + 2) if n in layers),
        ]
    }
    found |= {
        name: [0, *layers]
        for name in ("recompute_layers", "first_stage_layers", "last_stage_layers")
    }
    return {name: sorted({*values, getattr(t, name)}) for name, values in found.items()}


def _box(name: str, value: Any, numbers: Mapping[str, Sequence[int]]) -> Any:
    """The control of a field of the plan: a slider over the values that can be; what has no such
    list is typed.
    """
    options = {"engine": ENGINES, **CHOICES}
    look: Any = {"value": value, "description": name.replace("_", " "), "layout": {"width": "auto"}}
    if isinstance(value, bool):
        return Checkbox(indent=False, **look)
    look["style"] = {"description_width": "128px"}
    if name in options:
        return Dropdown(options=options[name], **look)
    if name in numbers:
        return SelectionSlider(options=numbers[name], **look)
    return BoundedIntText(min=0, max=LARGEST, continuous_update=False, **look)


class Editor:
    """The controls of one plan and what follows: `boxes` by field, a `button`; `widget` shows them.

    `base` is the plan it began with, with which others are compared; `chosen` that of the controls,
    None if refused.
    """

    # Its text is in widgets of its own: ipywidgets' `interactive` prints to an Output widget, whose
    # messages to the kernel made papermill wait forever in 5 of 32 such cells (ipykernel 7.4,
    # nbclient 0.11).
    def __init__(self, base: Candidate, calibration: Calibration, study: Study | None) -> None:
        self.base, self.calibration, self.study = base, calibration, study
        self.chosen: Candidate | None = base
        values = {"engine": base.plan.engine, **vars(base.topology)}
        numbers = sizes(base.plan)
        self.boxes = {name: _box(name, value, numbers) for name, value in values.items()}
        self.figure, self.picture = compared(base), Image(format="svg+xml")
        self.caption, self.message = HTML(), HTML()
        self.button = Button(description="use this plan")
        self.button.on_click(lambda _: self.use())
        for box in self.boxes.values():
            box.observe(self._changed, "value")
        grid = GridBox([*self.boxes.values()])
        grid.layout.grid_template_columns, grid.layout.width = (
            "repeat(auto-fill, minmax(250px, 1fr))",
            "100%",
        )
        self.widget = VBox(
            [grid, self.caption, self.picture, *[self.button] * bool(study), self.message]
        )
        self._changed()

    def use(self) -> None:
        """Put the plan first in the study's plans.json."""
        try:
            if not self.chosen or not self.study:
                raise ValueError("a refused plan cannot be used")
            path = use_plan(self.study, self.chosen, self.calibration)
            words = "{:code} is now first in {}: 03 and 07 begin with it."
            self.message.value = Html.of(words, self.chosen.label, path.name)
        except ValueError as error:
            self.message.value = Html.of("<b>not written</b>: {}", error)

    def _changed(self, _: Any = None) -> None:
        choices = {name: box.value for name, box in self.boxes.items()}
        self.caption.value, self.chosen = sentence(self.base, self.calibration, **choices)
        self.message.value = ""
        if self.chosen:  # else the last plan that can be stays in sight
            self.picture.value = svg_of(self.figure, self.chosen, self.base)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The controls; in a report without a kernel their text alone."""
        return {
            **self.widget._repr_mimebundle_(**options),
            "text/html": Html.of("<p>{}</p>", Html(self.caption.value)),
        }
