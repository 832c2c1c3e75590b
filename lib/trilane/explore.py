"""One plan by hand: widgets for its choices, and what is predicted for it at once."""

from typing import Any

from trilane.calibration import Calibration
from trilane.hardware import Cluster
from trilane.prediction import predict
from trilane.shape import ModelShape
from trilane.space import divisors
from trilane.topology import RECOMPUTE, Topology, refusal


def sentence(shape: ModelShape, cluster: Cluster, calibration: Calibration, **choices: Any) -> str:
    """What is predicted for one topology, as Markdown; where it cannot be, the rule that forbids it."""
    try:
        topology = Topology(**choices)
    except ValueError as error:
        return f"**refused**: {error}"
    reason = refusal(shape, topology)
    if reason:
        return f"**refused**: {reason}"
    p = predict(shape, topology, cluster, calibration)
    flops = shape.flops_per_iteration(topology.gbs, topology.recompute == "full") / p.sec_per_it / topology.gpus
    parts = sorted(((v, k.replace("_", " ")) for k, v in vars(p.time).items()), reverse=True)[:3]
    return (
        f"`{topology.label}` on {topology.gpus} GPUs: **{p.sec_per_it:.3g} s** an iteration "
        f"({p.sec_lo:.3g} to {p.sec_hi:.3g}), {flops / 1e12:.3g} TFLOP/s a GPU, **{p.memory_bytes / 2**30:.3g} GiB**, "
        f"out of memory with {p.oom_probability:.0%}; most of it "
        + ", ".join(f"{name} {seconds / p.sec_per_it:.0%}" for seconds, name in parts)
    )


def widgets(shape: ModelShape, cluster: Cluster, calibration: Calibration, base: Topology, gpus: int) -> Any:
    """Drop-downs for tp, pp, dp (up to `gpus`), mbs and recompute beginning at `base`, and what they amount to."""
    from IPython.display import Markdown, display
    from ipywidgets import Dropdown, interactive

    def show(**choices: Any) -> None:
        fixed = {"gbs": base.gbs, "zero": base.zero, "precision": base.precision, "partition": base.partition}
        display(Markdown(sentence(shape, cluster, calibration, **fixed, **choices)))

    sizes = divisors(gpus)
    options = {"tp": sizes, "pp": sizes, "dp": sizes, "mbs": [1, 2, 4, 8], "recompute": list(RECOMPUTE)}
    return interactive(
        show, **{name: Dropdown(options=o, value=getattr(base, name), description=name) for name, o in options.items()}
    )
