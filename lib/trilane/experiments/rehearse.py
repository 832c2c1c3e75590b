"""Rehearsal: train, save, load and resume the plan's engine and topology at tiny width and compare the states.

Done before a large run depends on them.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import drops_hidden
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Optimizer, Run
from trilane.diagnose.restart import RestartComparison, compare_restart
from trilane.experiments.parity import machine
from trilane.launch.local import train_local
from trilane.utils.validation import require
from trilane.workspace.checkpoints import FOLDER, name_of
from trilane.workspace.status import Status

PROCESSES = 8  # without GPUs
TOKENS = 257  # of the tokenizer "bytes"
ITERATIONS = 2  # one before the restart, one after it
Start = Callable[[Path], str]  # trains the plan in a folder; "", or why it failed


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A tiny plan, what it leaves out of the real one, and its result: the comparison, or the problem before it."""

    plan: Plan
    notes: tuple[str, ...]
    audit: RestartComparison | None = None
    problem: str = ""


def shrink(plan: Plan, folder: Path, cluster: Cluster, max_processes: int) -> Rehearsal:
    """The plan at tiny width for at most `max_processes`, with fewer replicas where necessary.

    Kept: engine, tp, pp, interleaving, ZeRO, offload, precision, recomputation, partition, ties and norms. Changed: the
    smallest model that this topology can split, two iterations, a learning rate at which weights move, a limit at
    which gradients are clipped, and dropout, so that generators matter. ValueError where one replica is too large.
    """
    t = plan.topology
    rule = f"one replica has more than the {max_processes} processes of this machine; see --prepare for a cluster"
    require(t.tp * t.pp <= max_processes, "tp x pp", t.tp * t.pp, rule)
    dp = min(t.dp, max_processes // (t.tp * t.pp))
    notes = (f"dp={dp} instead of {t.dp}: this machine runs at most {max_processes} processes",) if dp < t.dp else ()
    mbs, rounds = min(2, t.mbs), t.pp if t.interleaving > 1 else min(t.microbatches, max(2, t.pp))
    hidden = 0.1 if drops_hidden(plan.engine, plan.shape) else 0.0
    kept: dict[str, Any] = {"seed": plan.run.seed, "hang_timeout_s": plan.run.hang_timeout_s}
    small = Plan(
        label="rehearsal",
        engine=plan.engine,
        shape=_shape(plan),
        cluster=cluster,
        topology=replace(t, dp=dp, mbs=mbs, gbs=mbs * dp * rounds),
        data=Data(source="mock", folder=str(folder / "data")),
        optimizer=_optimizer(plan.optimizer),
        dropout=plan.dropout if plan.dropout != Dropout() else Dropout(hidden=hidden, attention=0.1),
        run=Run(train_iters=ITERATIONS, save_interval=1, keep_last=0, **kept),
    )
    return Rehearsal(plan=small, notes=notes)


def _optimizer(given: Optimizer) -> Optimizer:
    """A learning rate at which weights move at once, and a limit below every gradient norm."""
    limit = 0.1 if given.clip_grad else 0.0
    return replace(given, lr=1e-3, min_lr=1e-4, warmup_samples=0, decay_samples=0, clip_grad=limit)


def _shape(plan: Plan) -> ModelShape:
    """The smallest model that the plan's topology splits as it splits the plan's."""
    t, heads = plan.topology, 2 * plan.topology.tp
    narrow = replace(
        plan.shape,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        seq_length=t.tp * -(-32 // t.tp),
        vocab_size=padded_vocab_size(TOKENS, t.tp),
    )
    shapes = (replace(narrow, num_layers=layers) for layers in range(1, plan.shape.num_layers + 1))
    return next(shape for shape in shapes if _fits(plan, shape, t))


def _fits(plan: Plan, shape: ModelShape, t: Topology) -> bool:
    try:
        replace(plan, shape=shape, topology=t)
    except ValueError:
        return False
    return True


def write(folder: Path, plan: Plan) -> tuple[Path, Path]:
    """Write both run folders: `first` trains to the end, `second` resumes from its first checkpoint."""
    first, second = folder / "first", folder / "second"
    load = str(first / FOLDER / name_of(1))
    for place, made in ((first, plan), (second, replace(plan, run=replace(plan.run, load=load)))):
        require(not place.exists(), "folder", place, "exists; use a new one")
        place.mkdir(parents=True)
        (place / "plan.json").write_text(json.dumps(made.to_json(), indent=1) + "\n", encoding="utf-8")
    return first, second


def rehearse(rehearsal: Rehearsal, folder: Path, start: Start) -> Rehearsal:
    """Train, save, load, resume; compare the checkpoint with the loaded state, and both runs' last checkpoints."""
    first, second = write(folder, rehearsal.plan)
    for place in (first, second):
        problem = start(place)
        if problem:
            return replace(rehearsal, problem=f"{place.name} run: {problem}")
    return replace(rehearsal, audit=compare_restart(first, second))


def train_here(folder: Path) -> str:
    """Train on this machine; "", or the other status and its evidence."""
    outcome = train_local(folder, show_progress=False)
    return "" if outcome.status is Status.COMPLETED else f"{outcome.status}: {outcome.evidence}"


def rehearse_here(plan: Plan) -> Rehearsal:
    """The rehearsal of the plan on this machine, in a temporary folder."""
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    with tempfile.TemporaryDirectory(prefix="trilane-rehearse-") as place:
        asked = shrink(plan, Path(place), machine(cards=cards, bf16=True), cards or PROCESSES)
        return rehearse(asked, Path(place), train_here)


def prepare(plan: Plan, folder: Path) -> str:
    """Write both runs of a rehearsal on the plan's own cluster, and the commands that start them."""
    made = shrink(plan, folder, plan.cluster, plan.topology.gpus)
    return commands(*write(folder, made.plan), made.plan)


def commands(first: Path, second: Path, plan: Plan) -> str:
    """The commands to run on a cluster, in order."""
    tasks = f"srun --ntasks {plan.topology.gpus} --ntasks-per-node {plan.cluster.gpus_per_node}"
    lines = [f"{tasks} python -m trilane.engine {place / 'plan.json'}" for place in (first, second)]
    return "\n".join([*lines, f"trilane debug restart {first} {second}"])


def _label(plan: Plan) -> str:
    s = plan.shape
    return f"{plan.engine} {plan.topology.label} {plan.topology.precision}, {s.num_layers} layers x {s.hidden_size}"


def to_json(done: Rehearsal) -> dict[str, object]:
    """As a JSON object."""
    found = done.audit.to_json() if done.audit else {"compared": [], "findings": [], "notes": []}
    return {"plan": done.plan.to_json(), "left_out": done.notes, "problem": done.problem, **found}


def to_text(done: Rehearsal) -> str:
    """For a person."""
    text = done.problem or (done.audit.to_text() if done.audit else "")
    return "\n".join([f"rehearsed {_label(done.plan)}", *(f"note: {note}" for note in done.notes), text])
