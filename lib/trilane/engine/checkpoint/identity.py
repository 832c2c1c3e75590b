"""Identity: what a checkpoint was trained with, and whether a plan may go on from it."""

from typing import Any

from trilane.config.plan import Plan
from trilane.utils.validation import require, to_mapping


def identity(plan: Plan) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that loads it: the model, and the order of its samples."""
    data = {name: value for name, value in to_mapping(plan.data).items() if name != "folder"}
    return {"shape": to_mapping(plan.shape), "seed": plan.run.seed, "data": data, "samples of the run": plan.samples}


def layout(plan: Plan) -> list[Any]:
    """What must be the same for each rank to find its own random numbers again."""
    t = plan.topology
    return [plan.engine, t.tp, t.pp, t.dp, t.interleaving]


def require_same(where: str, held: dict[str, Any], plan: Plan, iteration: int, consumed: int) -> None:
    """ValueError that names the first thing in which the plan differs from the checkpoint `where`.

    A checkpoint that nobody trained, such as an imported one, says nothing of data.
    """
    ours_too = {name: value for name, value in identity(plan).items() if name in held}
    for name, value, wanted in _differences("", held, ours_too):
        raise ValueError(f"{name}={wanted}: the checkpoint {where} was trained with {value}")
    ours = plan.run.ramp.consumed(iteration, plan.topology.gbs)
    rule = f"the checkpoint {where} has seen {consumed} samples in {iteration} iterations, this plan would have {ours}"
    require(ours == consumed, "gbs", plan.topology.gbs, rule)
    rule = f"the checkpoint {where} has {iteration} iterations already"
    require(iteration <= plan.run.train_iters, "train_iters", plan.run.train_iters, rule)


def _differences(name: str, held: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(held, dict) and isinstance(wanted, dict):
        names = [*wanted, *(n for n in held if n not in wanted)]
        return [d for n in names for d in _differences(f"{name}.{n}".lstrip("."), held.get(n), wanted.get(n))]
    return [] if held == wanted else [(name, held, wanted)]
