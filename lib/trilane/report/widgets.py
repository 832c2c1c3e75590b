"""The editor of one plan: everything of it can be changed, its prediction or the rule against it follows."""

from typing import Any

from trilane.config.engines import ENGINES
from trilane.config.parallelism import CHOICES, LARGEST
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.planning.search_result import Candidate
from trilane.planning.vary import FIELDS, WhatIfs, possible, use_plan, varied
from trilane.utils.numbers import with_interval
from trilane.utils.tables import Html
from trilane.workspace.study import Study

MOST = 5  # plans that are pinned beside the first


def sentence(base: Candidate, calibration: Calibration, **choices: Any) -> tuple[Html, Candidate | None]:
    """The prediction of the plan with other choices, as HTML, and the plan; for an impossible one the rule, and None.

    Of a rule it says which values of its field would keep all rules.
    """
    try:
        chosen = varied(base.plan, calibration, **choices)
    except ValueError as error:
        field = str(error).partition("=")[0]
        values = possible(base.plan, field, **choices)
        instead = f"; possible here: {field} {', '.join(map(str, values))}" if values else ""
        return Html.of("<b>refused</b>: {}{}", error, instead), None
    p, plan, gpus = chosen.prediction, chosen.plan, chosen.topology.gpus
    full = plan.topology.recompute == "full"
    rate = plan.shape.flops_per_iteration(plan.topology.gbs, full) / p.sec_per_it / gpus / 1e12
    parts = sorted(((v, k.replace("_", " ")) for k, v in vars(p.time).items()), reverse=True)[:3]
    change = p.sec_per_it / base.prediction.sec_per_it - 1
    return Html.of(
        "{:code} ({}) on {} GPUs: <b>{} s</b> an iteration ({} to {}){}, {:.3g} TFLOP/s a GPU, "
        "<b>{:.3g} GiB</b>, out of memory with {:.0%}; most of it {}; {}",
        *(plan.label, plan.id, gpus, *with_interval(p.sec_per_it, p.sec_lo, p.sec_hi)),
        f", {change:+.1%} against the first plan" if plan.id != base.plan.id else "",
        *(rate, p.memory_bytes / 2**30, p.oom_probability),
        ", ".join(f"{name} {seconds / p.sec_per_it:.0%}" for seconds, name in parts),
        p.support.words,
    ), chosen


def explore(base: Plan, calibration: Calibration, study: Study | None = None) -> "Editor":
    """An editor that starts at the plan `base`: a control for each field, what is predicted, pinned plans, and, with a
    `study`, a button that puts the plan first in its plans.json.

    The text is in widgets of its own. ipywidgets' `interactive` would print it to an Output widget, whose messages to
    the kernel made papermill miss the end of 5 of 32 such cells (docs/log.md) and wait forever.
    """
    return Editor(varied(base, calibration), calibration, study)


def _number(description: str, value: int) -> Any:
    """A control for a number, which says that it has changed once it was typed."""
    from ipywidgets import BoundedIntText

    look: Any = {"description": description, "style": {"description_width": "128px"}, "layout": {"width": "auto"}}
    return BoundedIntText(value=value, min=0, max=LARGEST, continuous_update=False, **look)


def _boxes(plan: Plan) -> dict[str, Any]:
    """A control for each field of the topology and for the engine: numbers are typed, the rules say what can be."""
    from ipywidgets import Checkbox, Dropdown

    names = dict.fromkeys(("tp", "pp", "dp", "cp", *FIELDS))
    values = {"engine": plan.engine, **{name: getattr(plan.topology, name) for name in names}}
    options, boxes = {"engine": ENGINES, **CHOICES}, dict[str, Any]()
    for name, value in values.items():
        look: Any = {"description": name.replace("_", " "), "layout": {"width": "auto"}}
        if isinstance(value, bool):
            boxes[name] = Checkbox(value=value, indent=False, **look)
        elif name in options:
            boxes[name] = Dropdown(options=options[name], value=value, style={"description_width": "128px"}, **look)
        else:
            boxes[name] = _number(look["description"], value)
    return boxes


class Editor:
    """The controls of one plan and what they say: `boxes` by field, `gpus`, `buttons` by name; `widget` shows them.

    base     the plan it began with, with which others are compared; `chosen` the one of the controls, None if refused
    pinned   the plans of the table, the oldest first
    """

    def __init__(self, base: Candidate, calibration: Calibration, study: Study | None) -> None:
        from ipywidgets import HTML, Button, GridBox, HBox, VBox

        self.base, self.calibration, self.study = base, calibration, study
        self.chosen: Candidate | None = base
        self.pinned: list[Candidate] = []
        self.is_setting = False
        self.boxes, self.gpus = _boxes(base.plan), _number("GPUs (sets dp)", base.topology.gpus)
        self.caption, self.table, self.message = HTML(), HTML(), HTML()
        actions = {"pin": self.pin, "unpin all": self.unpin, "first plan": self.reset}
        actions |= {"use this plan": self.use} if study else {}
        self.buttons = {name: Button(description=name) for name in actions}
        for name, button in self.buttons.items():
            button.on_click(lambda _, action=actions[name]: action())
        for box in self.boxes.values():
            box.observe(self._changed, "value")
        self.gpus.observe(self._spread, "value")
        grid = GridBox([self.gpus, *self.boxes.values()])
        grid.layout.grid_template_columns, grid.layout.width = "repeat(auto-fill, minmax(250px, 1fr))", "100%"
        self.widget = VBox([grid, self.caption, HBox([*self.buttons.values()]), self.message, self.table])
        self._changed()

    def set(self, **values: Any) -> None:
        """Give controls these values, and predict once."""
        self.is_setting = True
        try:
            for name, value in values.items():
                self.boxes[name].value = value
        finally:
            self.is_setting = False
        self._changed()

    def pin(self) -> None:
        """Keep the plan in the table, the newest last."""
        known = [c.plan.id for c in (self.base, *self.pinned)]
        if self.chosen and self.chosen.plan.id not in known:
            self.pinned = [*self.pinned, self.chosen][-MOST:]
        self._show_pinned()

    def unpin(self) -> None:
        """Empty the table."""
        self.pinned = []
        self._show_pinned()

    def reset(self) -> None:
        """Go back to the first plan."""
        self.set(engine=self.base.plan.engine, **vars(self.base.topology))

    def use(self) -> None:
        """Put the plan first in the study's plans.json."""
        try:
            if not self.chosen or not self.study:
                raise ValueError("a refused plan cannot be used")
            path = use_plan(self.study, self.chosen, self.calibration)
            self.message.value = Html.of(
                "{:code} is now first in {}: 03 and 07 begin with it.", self.chosen.label, path.name
            )
        except ValueError as error:
            self.message.value = Html.of("<b>not written</b>: {}", error)

    def _show_pinned(self) -> None:
        self.table.value = WhatIfs(rows=(self.base, *self.pinned))._repr_html_() if self.pinned else ""

    def _changed(self, _: Any = None) -> None:
        if self.is_setting:
            return
        choices = {name: box.value for name, box in self.boxes.items()}
        self.caption.value, self.chosen = sentence(self.base, self.calibration, **choices)
        self.message.value = ""
        self.is_setting = True
        self.gpus.value = min(choices["tp"] * choices["pp"] * choices["dp"] * choices["cp"] or 1, LARGEST)
        self.is_setting = False

    def _spread(self, _: Any = None) -> None:
        """As many replicas as make the GPUs, where tp, pp and cp divide them."""
        if self.is_setting:
            return
        gpus, each = self.gpus.value, self.boxes["tp"].value * self.boxes["pp"].value * self.boxes["cp"].value
        if each and gpus % each == 0:
            self.set(dp=gpus // each)
        else:
            self.chosen = None
            self.caption.value = Html.of("<b>refused</b>: gpus={}: must be a multiple of tp x cp x pp = {}", gpus, each)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The controls; in a report without a kernel their text alone."""
        text = Html.of("<p>{}</p>{}", Html(self.caption.value), Html(self.table.value))
        return {**self.widget._repr_mimebundle_(**options), "text/html": text}
