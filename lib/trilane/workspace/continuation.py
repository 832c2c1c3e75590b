"""What a checkpoint records of the run that wrote it, and which plans may continue from it; without
torch.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from trilane.config.layer import STANDARD
from trilane.config.plan import Plan
from trilane.config.training import ranges_text, until
from trilane.utils.validation import require, shown, to_mapping
from trilane.workspace.checkpoints import FOLDER, complete, found_in, read_manifest

# what may change from one part of a run to the next, and is printed when it resumes
FREE = ("engine", "topology", "optimizer", "dropout", "run")


def identity(plan: Plan) -> dict[str, Any]:
    """What a checkpoint records of its run: model, seed and data, which must not change; length,
    skips and FREE.
    """
    data = {name: value for name, value in to_mapping(plan.data).items() if name != "folder"}
    fixed = {
        "shape": to_mapping(plan.shape),
        "layer": str(plan.layer or STANDARD),
        "seed": plan.run.seed,
        "data": data,
    }
    values = to_mapping(plan)
    free = {**{name: values[name] for name in FREE}, "run": {"ramp": values["run"]["ramp"]}}
    return {
        **fixed,
        **free,
        "length": plan.samples,
        "skip": [list(ends) for ends in plan.run.skipped],
    }


def candidates(folder: Path, plan: Plan) -> list[Path]:
    """The checkpoints that the run in `folder` may start from, the newest first: its own, else
    those of run.load.
    """
    own = complete(folder / FOLDER)
    if own or not plan.run.load:
        return own[::-1]
    found = found_in(Path(plan.run.load))
    require(bool(found), "run.load", plan.run.load, "holds no complete checkpoint")
    return found[::-1]


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


def require_same(where: str, manifest: Mapping[str, Any], plan: Plan) -> None:
    """ValueError that names the first thing in which the plan differs from the checkpoint `where`."""
    held, iteration, consumed = (
        manifest["identity"],
        manifest["iteration"],
        manifest["consumed_samples"],
    )
    # the latter for what is still to be trained
    kept, own = (
        {name: v for name, v in facts.items() if name not in ("length", "skip", *FREE)}
        for facts in (held, identity(plan))
    )
    for name, value, wanted in _differences("", kept, own):
        raise ValueError(f"{name}={wanted}: the checkpoint {where} was trained with {value}")
    expected = plan.run.ramp.consumed(iteration, plan.topology.gbs)
    rule = f"the checkpoint {where} has seen {consumed} samples in {iteration} iterations"
    require(
        expected == consumed, "gbs", plan.topology.gbs, f"{rule}, this plan would have {expected}"
    )
    rule = f"the checkpoint {where} has {iteration} iterations already"
    require(iteration <= plan.run.train_iters, "train_iters", plan.run.train_iters, rule)
    done, wanted = until(held.get("skip", []), iteration), until(plan.run.skipped, iteration)
    trained, lacking = (
        [r for r in one if r not in other] for one, other in ((wanted, done), (done, wanted))
    )
    before = trained[0][0] if trained else 0
    rule = f"the checkpoint {where} has trained in {ranges_text(trained)}; load one of before iteration {before}"
    require(not trained, "skip", plan.run.skip, rule)
    require(
        not lacking,
        "skip",
        plan.run.skip,
        f"the checkpoint {where} has skipped {ranges_text(lacking)}",
    )


def _differences(name: str, held: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(held, dict) and isinstance(wanted, dict):
        names = [*wanted, *(n for n in held if n not in wanted)]
        return [
            d
            for n in names
            for d in _differences(f"{name}.{n}".lstrip("."), held.get(n), wanted.get(n))
        ]
    return [] if held == wanted else [(name, held, wanted)]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two plans, or parts of them, as JSON objects: a line a field, with its
    meaning.

    ["optimizer.lr: 6e-05 -> 0.0006 (peak learning rate)"]
    """
    found = []
    for name, old, new in _differences("", before, after):
        texts = [shown("none" if value in (None, "") else value, 60) for value in (old, new)]
        what = " -> ".join(texts) if texts[0] != texts[1] else f"{texts[0]} differs in its middle"
        meaning = _meaning(name)
        found.append(f"{shown(name, 60)}: {what}" + f" ({meaning})" * bool(meaning))
    return found


def since(manifest: Mapping[str, Any], plan: Plan) -> list[str]:
    """What the plan changes of the run that wrote the checkpoint, a line each, as far as the
    checkpoint records it.
    """
    held, own = manifest["identity"], identity(plan)
    names = [name for name in FREE if name in held]
    lines = changes({name: held[name] for name in names}, {name: own[name] for name in names})
    return [*lines, *filter(None, [extension(manifest, plan)])]


def _meaning(path: str) -> str:
    """The words of a plan's field, such as "optimizer.lr"."""
    kind, text = Plan, ""
    for name in path.split("."):
        field = (
            next((f for f in fields(kind) if f.name == name), None) if is_dataclass(kind) else None
        )
        kind, text = (field.type, field.metadata.get("help", "")) if field else (None, text)  # type: ignore[assignment]
    return text


def extension(manifest: Mapping[str, Any], plan: Plan) -> str:
    """One line where the plan is longer or shorter than the run that wrote the checkpoint; else ""."""
    before, after = manifest["identity"].get("length", 0), plan.samples
    if not before or before == after:
        return ""
    # the rate leaps where the cosine lasts as long as the run
    rate = (
        "stays as it was: decay_samples is set"
        if plan.optimizer.decay_samples
        else "decays to the new end"
    )
    return f"the run has {after} samples instead of {before}; its learning rate {rate}"
