"""Rehearsal: train, save, load and resume the plan's engine and topology at tiny width and compare
the states.

Done before a large run depends on them.
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trilane.config.cluster import Cluster
from trilane.config.engines import drops_hidden
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Run
from trilane.launch.local import train_local
from trilane.utils.frozen import frozen
from trilane.utils.validation import require, require_new
from trilane.workspace.checkpoints import FOLDER, name_of
from trilane.workspace.run import write_text
from trilane.workspace.status import Status
from trilane_diagnose.restart import RestartComparison, compare_restart

Start = Callable[[Path], str]  # trains the plan in a folder; "", or why it failed


@frozen
class Rehearsal:
    """A tiny plan and its result: the comparison, or the problem before it."""

    plan: Plan
    audit: RestartComparison | None = None
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        audit = self.audit.to_json() if self.audit else {}
        return {"plan": self.plan.to_json(), "problem": self.problem, **audit}

    def summary(self) -> str:
        """What was rehearsed, and the problem or the comparison."""
        plan = self.plan
        size = f"{plan.shape.num_layers} layers x {plan.shape.hidden_size}"
        head = f"rehearsed {plan.engine} {plan.topology.label} {plan.topology.precision}, {size}"
        text = self.audit.summary() if self.audit else self.problem
        return f"{head}\n{text}"


def shrink(plan: Plan, folder: Path, cluster: Cluster, max_processes: int) -> Plan:
    """The plan at tiny width for at most `max_processes`, with fewer replicas where necessary.

    Kept: engine, layer, tp, pp, interleaving, ZeRO, offload, precision, recomputation, partition,
    ties and norms. ValueError where one replica is too large.
    """
    # The smallest model that this topology can split, two iterations, a learning rate at which
    # weights move, a limit at which gradients are clipped, and dropout, so that generators matter.
    topology = plan.topology
    replica = topology.tp * topology.cp * topology.pp
    rule = f"one replica has more than the {max_processes} processes of this machine"
    rule += "; see --prepare for a cluster"
    require(replica <= max_processes, "tp x cp x pp", replica, rule)
    dp = min(topology.dp, max_processes // replica)
    mbs = min(2, topology.mbs)
    microbatches = min(topology.microbatches, max(2, topology.pp))
    if topology.interleaving > 1:
        microbatches = topology.pp
    dropout = plan.dropout
    if dropout == Dropout():
        hidden = 0.1 if drops_hidden(plan.engine, plan.shape) else 0.0
        dropout = Dropout(hidden=hidden, attention=0.1)
    optimizer = replace(
        plan.optimizer,
        lr=1e-3,
        min_lr=1e-4,
        warmup_samples=0,
        decay_samples=0,
        decay_style="cosine",  # WSD's decay is longer than a rehearsal
    )
    if optimizer.clip_grad:
        optimizer = replace(optimizer, clip_grad=0.1)
    return Plan(
        label="rehearsal",
        engine=plan.engine,
        layer=plan.layer,
        shape=_shape(plan),
        cluster=cluster,
        topology=replace(topology, dp=dp, mbs=mbs, gbs=mbs * dp * microbatches),
        data=Data(source="mock", folder=str(folder / "data")),
        optimizer=optimizer,
        dropout=dropout,
        # one iteration before the restart, one after it
        run=Run(
            train_iters=2,
            save_interval=1,
            keep_last=0,
            seed=plan.run.seed,
            hang_timeout_s=plan.run.hang_timeout_s,
        ),
    )


def _shape(plan: Plan) -> ModelShape:
    """The smallest model that the plan's topology splits as it splits the plan's."""
    tp = plan.topology.tp
    heads = 2 * tp
    parts = 2 * plan.topology.cp * tp  # of a sequence
    small = replace(
        plan.shape,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        seq_length=parts * math.ceil(32 / parts),
        vocab_size=padded_vocab_size(257, tp),  # of the tokenizer "bytes"
    )
    for layers in range(1, plan.shape.num_layers + 1):
        with contextlib.suppress(ValueError):
            return replace(plan, shape=replace(small, num_layers=layers)).shape
    raise AssertionError(f"{plan.label} cannot be split itself")


def write(folder: Path, plan: Plan) -> tuple[Path, Path]:
    """Write both run folders: `first` trains to the end, `second` resumes from its first
    checkpoint.
    """
    first = folder / "first"
    second = folder / "second"
    resumed = replace(plan, run=replace(plan.run, load=str(first / FOLDER / name_of(1))))
    for place, own in ((first, plan), (second, resumed)):
        require_new("folder", place, "use a new one")
        write_text(place / "plan.json", json.dumps(own.to_json(), indent=1) + "\n")
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
    if outcome.status is Status.COMPLETED:
        return ""
    return f"{outcome.status}: {outcome.evidence}"


def rehearse_here(plan: Plan) -> Rehearsal:
    """The rehearsal of the plan on this machine, in a temporary folder."""
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpu = replace(plan.cluster.gpu, kind="cuda" if cards else "cpu")
    name = "this machine"
    here = replace(plan.cluster, name=name, gpu=gpu, gpus_per_node=cards or 8, max_nodes=1)
    with tempfile.TemporaryDirectory(prefix="trilane-rehearse-") as place:
        return rehearse(shrink(plan, Path(place), here, here.max_gpus), Path(place), train_here)


def prepare(plan: Plan, folder: Path) -> str:
    """Write both runs of a rehearsal on the plan's own cluster; the commands that start them there,
    in order.
    """
    tiny = shrink(plan, folder, plan.cluster, plan.topology.gpus)
    first, second = write(folder, tiny)
    tasks = f"srun --ntasks {tiny.topology.gpus} --ntasks-per-node {tiny.cluster.gpus_per_node}"
    lines = [f"{tasks} python -m trilane_engine {place / 'plan.json'}" for place in (first, second)]
    return "\n".join([*lines, f"trilane debug restart {first} {second}"])
