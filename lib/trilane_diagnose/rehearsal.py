"""Rehearsal: train, save, load and resume the plan's engine and topology at tiny width and compare
the states.

Done before a large run depends on them.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.config.cluster import Cluster
from trilane.config.engines import drops_hidden
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Run
from trilane.launch.local import train_local
from trilane.utils.tables import as_json
from trilane.utils.validation import require
from trilane.workspace.checkpoints import FOLDER, name_of
from trilane.workspace.run import write_text
from trilane.workspace.status import Status
from trilane_diagnose.restart import RestartComparison, compare_restart

Start = Callable[[Path], str]  # trains the plan in a folder; "", or why it failed


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A tiny plan and its result: the comparison, or the problem before it."""

    plan: Plan
    audit: RestartComparison | None = None
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        found = {
            name: as_json(getattr(self.audit, name, ()))
            for name in ("compared", "findings", "notes")
        }
        return {"plan": self.plan.to_json(), "problem": self.problem, **found}

    def to_text(self) -> str:
        """For a person."""
        p, text = self.plan, self.problem or (self.audit.to_text() if self.audit else "")
        size = f"{p.shape.num_layers} layers x {p.shape.hidden_size}"
        head = f"rehearsed {p.engine} {p.topology.label} {p.topology.precision}, {size}"
        return f"{head}\n{text}"


def shrink(plan: Plan, folder: Path, cluster: Cluster, max_processes: int) -> Plan:
    """The plan at tiny width for at most `max_processes`, with fewer replicas where necessary.

    Kept: engine, layer, tp, pp, interleaving, ZeRO, offload, precision, recomputation, partition,
    ties and norms. ValueError where one replica is too large.
    """
    # The smallest model that this topology can split, two iterations, a learning rate at which
    # weights move, a limit at which gradients are clipped, and dropout, so that generators matter.
    t, run = plan.topology, plan.run
    rule = f"one replica has more than the {max_processes} processes of this machine; see --prepare for a cluster"
    replica = t.tp * t.cp * t.pp
    require(replica <= max_processes, "tp x cp x pp", replica, rule)
    dp = min(t.dp, max_processes // replica)
    mbs, rounds = min(2, t.mbs), t.pp if t.interleaving > 1 else min(t.microbatches, max(2, t.pp))
    limit, hidden = (
        0.1 if plan.optimizer.clip_grad else 0.0,
        0.1 if drops_hidden(plan.engine, plan.shape) else 0.0,
    )
    return Plan(
        label="rehearsal",
        engine=plan.engine,
        layer=plan.layer,
        shape=_shape(plan),
        cluster=cluster,
        topology=replace(t, dp=dp, mbs=mbs, gbs=mbs * dp * rounds),
        data=Data(source="mock", folder=str(folder / "data")),
        optimizer=replace(
            plan.optimizer, lr=1e-3, min_lr=1e-4, warmup_samples=0, decay_samples=0, clip_grad=limit
        ),
        dropout=plan.dropout
        if plan.dropout != Dropout()
        else Dropout(hidden=hidden, attention=0.1),
        # one iteration before the restart, one after it
        run=Run(
            train_iters=2,
            save_interval=1,
            keep_last=0,
            seed=run.seed,
            hang_timeout_s=run.hang_timeout_s,
        ),
    )


def _shape(plan: Plan) -> ModelShape:
    """The smallest model that the plan's topology splits as it splits the plan's."""
    tp, heads = plan.topology.tp, 2 * plan.topology.tp
    parts = 2 * plan.topology.cp * tp  # of a sequence
    small = replace(
        plan.shape,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        seq_length=parts * -(-32 // parts),
    )
    small = replace(small, vocab_size=padded_vocab_size(257, tp))  # of the tokenizer "bytes"
    for layers in range(1, plan.shape.num_layers + 1):
        with contextlib.suppress(ValueError):
            return replace(plan, shape=replace(small, num_layers=layers)).shape
    raise AssertionError(f"{plan.label} cannot be split itself")


def write(folder: Path, plan: Plan) -> tuple[Path, Path]:
    """Write both run folders: `first` trains to the end, `second` resumes from its first
    checkpoint.
    """
    first, second = folder / "first", folder / "second"
    load = str(first / FOLDER / name_of(1))
    for place, made in ((first, plan), (second, replace(plan, run=replace(plan.run, load=load)))):
        require(not place.exists(), "folder", place, "exists; use a new one")
        write_text(place / "plan.json", json.dumps(made.to_json(), indent=1) + "\n")
    return first, second


def rehearse(plan: Plan, folder: Path, start: Start) -> Rehearsal:
    """Train, save, load, resume; compare the checkpoint with the loaded state, and both runs' last
    checkpoints.
    """
    first, second = write(folder, plan)
    for place in (first, second):
        problem = start(place)
        if problem:
            return Rehearsal(plan=plan, problem=f"{place.name} run: {problem}")
    return Rehearsal(plan=plan, audit=compare_restart(first, second))


def train_here(folder: Path) -> str:
    """Train on this machine; "", or the other status and its evidence."""
    outcome = train_local(folder, show_progress=False)
    return "" if outcome.status is Status.COMPLETED else f"{outcome.status}: {outcome.evidence}"


def rehearse_here(plan: Plan) -> Rehearsal:
    """The rehearsal of the plan on this machine, in a temporary folder."""
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpu = replace(plan.cluster.gpu, kind="cuda" if cards else "cpu")
    here = replace(
        plan.cluster, name="this machine", gpu=gpu, gpus_per_node=cards or 8, max_nodes=1
    )
    with tempfile.TemporaryDirectory(prefix="trilane-rehearse-") as place:
        return rehearse(shrink(plan, Path(place), here, here.max_gpus), Path(place), train_here)


def prepare(plan: Plan, folder: Path) -> str:
    """Write both runs of a rehearsal on the plan's own cluster; the commands that start them there,
    in order.
    """
    made = shrink(plan, folder, plan.cluster, plan.topology.gpus)
    first, second = write(folder, made)
    tasks = f"srun --ntasks {made.topology.gpus} --ntasks-per-node {made.cluster.gpus_per_node}"
    lines = [f"{tasks} python -m trilane_engine {place / 'plan.json'}" for place in (first, second)]
    return "\n".join([*lines, f"trilane debug restart {first} {second}"])
