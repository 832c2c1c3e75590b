"""Widgets that vary one plan and show its prediction."""

from dataclasses import replace
from typing import Any

from trilane.config.engines import label_of
from trilane.config.parallelism import RECOMPUTE, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import predict
from trilane.planning.space import divisors
from trilane.utils.tables import Html


def sentence(base: Plan, calibration: Calibration, **choices: Any) -> Html:
    """The prediction of the plan with other choices, as HTML; for an impossible one, the rule that forbids it."""
    try:
        topology = replace(base.topology, **choices)
        reason = invalid_reason(base.shape, topology, base.cluster)
        plan = replace(base, topology=topology, label=label_of(base.shape, base.cluster, topology, base.engine))
    except ValueError as error:
        reason = str(error)
    if reason:
        return Html.of("<b>refused</b>: {}", reason)
    p, shape = predict(plan, calibration), base.shape
    flops = shape.flops_per_iteration(topology.gbs, topology.recompute == "full") / p.sec_per_it / topology.gpus
    parts = sorted(((v, k.replace("_", " ")) for k, v in vars(p.time).items()), reverse=True)[:3]
    return Html.of(
        "{:code} ({}) on {} GPUs: <b>{:.3g} s</b> an iteration ({:.3g} to {:.3g}), {:.3g} TFLOP/s a GPU, "
        "<b>{:.3g} GiB</b>, out of memory with {:.0%}; most of it {}",
        *(plan.label, plan.id, topology.gpus, p.sec_per_it, p.sec_lo, p.sec_hi, flops / 1e12),
        *(p.memory_bytes / 2**30, p.oom_probability),
        ", ".join(f"{name} {seconds / p.sec_per_it:.0%}" for seconds, name in parts),
    )


def explore(base: Plan, calibration: Calibration, gpus: int) -> Any:
    """Drop-downs for tp, pp, dp (up to `gpus`), mbs and recompute starting at the plan `base`, with its prediction.

    The text is in a widget of its own. ipywidgets' `interactive` would print it to an Output widget, whose messages to
    the kernel made papermill miss the end of 5 of 32 such cells (docs/log.md) and wait forever.
    """
    from ipywidgets import HTML, Dropdown, VBox

    sizes = divisors(gpus)
    options = {"tp": sizes, "pp": sizes, "dp": sizes, "mbs": [1, 2, 4, 8], "recompute": list(RECOMPUTE)}
    boxes = {
        name: Dropdown(options=o, value=getattr(base.topology, name), description=name) for name, o in options.items()
    }
    caption = HTML()

    def show(_: Any = None) -> None:
        choices = {name: box.value for name, box in boxes.items()}
        caption.value = sentence(base, calibration, **choices)

    for box in boxes.values():
        box.observe(show, "value")

    class Explorer(VBox):
        """As HTML, in a report without a kernel, the text alone."""

        def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
            return {**super()._repr_mimebundle_(**options), "text/html": Html.of("<p>{}</p>", Html(caption.value))}

    show()
    return Explorer([*boxes.values(), caption])
