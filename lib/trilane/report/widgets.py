"""One plan by hand: widgets for its choices, and what is predicted for it at once."""

import html
from dataclasses import replace
from typing import Any

from trilane.config.engines import label_of
from trilane.config.parallelism import RECOMPUTE, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import predict
from trilane.planning.space import divisors


def sentence(base: Plan, calibration: Calibration, **choices: Any) -> str:
    """What is predicted for the plan with other choices, as HTML; where it cannot be, the rule that forbids it."""
    try:
        topology = replace(base.topology, **choices)
        reason = invalid_reason(base.shape, topology, base.cluster)
        plan = replace(base, topology=topology, label=label_of(base.shape, base.cluster, topology, base.engine))
    except ValueError as error:
        reason = str(error)
    if reason:
        return f"<b>refused</b>: {html.escape(reason)}"
    p, shape = predict(plan, calibration), base.shape
    flops = shape.flops_per_iteration(topology.gbs, topology.recompute == "full") / p.sec_per_it / topology.gpus
    parts = sorted(((v, k.replace("_", " ")) for k, v in vars(p.time).items()), reverse=True)[:3]
    return (
        f"<code>{html.escape(plan.label)}</code> ({plan.id}) on {topology.gpus} GPUs: <b>{p.sec_per_it:.3g} s</b> an "
        f"iteration ({p.sec_lo:.3g} to {p.sec_hi:.3g}), {flops / 1e12:.3g} TFLOP/s a GPU, "
        f"<b>{p.memory_bytes / 2**30:.3g} GiB</b>, "
        f"out of memory with {p.oom_probability:.0%}; most of it "
        + ", ".join(f"{name} {seconds / p.sec_per_it:.0%}" for seconds, name in parts)
    )


def explore(base: Plan, calibration: Calibration, gpus: int) -> Any:
    """Drop-downs for tp, pp, dp (up to `gpus`), mbs and recompute beginning at the plan `base`, and what they give.

    The words stand in a widget of their own. ipywidgets' `interactive` would print them to an Output widget, whose
    messages back to the kernel cost papermill the end of 5 of 32 such cells (docs/log.md): it then waits for ever.
    """
    from ipywidgets import HTML, Dropdown, VBox

    sizes = divisors(gpus)
    options = {"tp": sizes, "pp": sizes, "dp": sizes, "mbs": [1, 2, 4, 8], "recompute": list(RECOMPUTE)}
    boxes = {
        name: Dropdown(options=o, value=getattr(base.topology, name), description=name) for name, o in options.items()
    }
    said = HTML()

    def show(_: Any = None) -> None:
        choices = {name: box.value for name, box in boxes.items()}
        said.value = sentence(base, calibration, **choices)

    for box in boxes.values():
        box.observe(show, "value")

    class Explorer(VBox):
        """Where nothing can be clicked, as in a report, the words alone."""

        def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
            return {**super()._repr_mimebundle_(**options), "text/html": f"<p>{said.value}</p>"}

    show()
    return Explorer([*boxes.values(), said])
