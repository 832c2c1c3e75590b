"""What a checkpoint records of the run that wrote it, and which plans may continue from it; without
torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilane.config.layer import STANDARD
from trilane.config.plan import Plan
from trilane.config.training import until
from trilane.utils.tables import Json
from trilane.utils.validation import require, shown, to_mapping
from trilane.workspace.checkpoints import FOLDER, complete, found_in, read_manifest

# what may change from one part of a run to the next, and is printed when it resumes
FREE = ("engine", "topology", "optimizer", "dropout", "run")


def identity(plan: Plan) -> Json:
    """What a checkpoint records of its run: model, seed and data, which must not change; length,
    skips and FREE.
    """
    values = to_mapping(plan)
    del values["data"]["folder"]
    record = {name: values[name] for name in ("shape", "data", *FREE)}
    record["run"] = {"ramp": values["run"]["ramp"]}
    record["layer"] = str(plan.layer or STANDARD)
    record["seed"] = plan.run.seed
    record["length"] = plan.samples
    record["skip"] = [list(ends) for ends in plan.run.skipped]
    return record


def candidates(folder: Path, plan: Plan) -> list[Path]:
    """The checkpoints that the run in `folder` may start from, the newest first: its own, else
    those of run.load.
    """
    checkpoints = complete(folder / FOLDER)
    if plan.run.load and not checkpoints:
        checkpoints = found_in(Path(plan.run.load))
        require(checkpoints, "run.load", plan.run.load, "holds no complete checkpoint")
    return checkpoints[::-1]


def require_continuable(folder: Path, plan: Plan) -> None:
    """ValueError where the plan must not continue from the newest readable checkpoint of the run in
    `folder`.
    """
    for path in candidates(folder, plan):
        try:
            manifest = read_manifest(path)
        except ValueError:
            continue  # the engine reports it, and tries the one before
        require_same(path.name, manifest, plan)
        return


def require_same(where: str, manifest: Json, plan: Plan) -> None:
    """ValueError with the first thing in which the plan differs from the checkpoint `where`."""
    held = manifest["identity"]
    iteration = manifest["iteration"]
    consumed = manifest["consumed_samples"]
    checkpoint = f"the checkpoint {where}"
    wanted = identity(plan)
    # the others are for what is still to be trained
    for field in ("shape", "layer", "seed", "data"):
        for name, before, after in _differences(field, held.get(field), wanted[field]):
            raise ValueError(f"{name}={after}: {checkpoint} was trained with {before}")
    expected = plan.run.ramp.consumed(iteration, plan.topology.gbs)
    rule = f"{checkpoint} has seen {consumed} samples in {iteration} iterations"
    rule += f", this plan would have {expected}"
    require(expected == consumed, "gbs", plan.topology.gbs, rule)
    iterations = plan.run.train_iters
    rule = f"{checkpoint} has {iteration} iterations already"
    require(iteration <= iterations, "train_iters", iterations, rule)
    skipped = until(held.get("skip", []), iteration)
    rule = f"{checkpoint} has skipped {skipped or 'nothing'}"
    require(skipped == until(plan.run.skipped, iteration), "skip", plan.run.skip, rule)


def _differences(name: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """The fields that differ, by their path, with both values."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before == after:
            return []
        return [(name, before, after)]
    pairs = []
    for key in after | before:
        path = f"{name}.{key}".lstrip(".")
        pairs += _differences(path, before.get(key), after.get(key))
    return pairs


def changes(before: Json, after: Json) -> list[str]:
    """What differs between two plans, or parts of them, as JSON objects: a line a field.

    ["optimizer.lr: 6e-05 -> 0.0006"]
    """
    return [
        f"{shown(name, 60)}: {shown(old, 60)} -> {shown(new, 60)}"
        for name, old, new in _differences("", before, after)
    ]


def since(manifest: Mapping[str, Any], plan: Plan) -> list[str]:
    """What the plan changes of the run that wrote the checkpoint, a line each, as far as the
    checkpoint records it.
    """
    held = manifest["identity"]
    wanted = identity(plan)
    names = [name for name in (*FREE, "length") if name in held]
    return changes({n: held[n] for n in names}, {n: wanted[n] for n in names})
