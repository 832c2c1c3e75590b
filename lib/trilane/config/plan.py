"""Plan: shape + cluster + topology + engine + data + run limits. One JSON file, the engine's only
input.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from trilane.config.batch_rampup import Batch
from trilane.config.cluster import Cluster, cluster
from trilane.config.engines import (
    ENGINES,
    default_topology,
    drops_hidden,
    label_of,
    sums_in_fp32,
    unsupported_reason,
)
from trilane.config.layer import Layer, read_layer
from trilane.config.model import ModelShape
from trilane.config.options import Rules, changed, check, first_broken, option
from trilane.config.parallelism import HasTopology, Topology, dispatcher_rules, invalid_reason
from trilane.config.training import Data, Dropout, Optimizer, Run, inside
from trilane.utils.files import hash_of, write_new
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Record
from trilane.utils.validation import (
    from_mapping,
    read_json,
    require,
    require_known,
    require_label,
    to_mapping,
)

# What results write next to the fields of a plan: derived from it, so never read back.
DERIVED = (
    "id",
    "prediction",
    "parameters",
    "tflops",
    "mfu",
    "days",
    "measured",
    "why",
    "costs",
    "notes",
)
# the order is kept as some bytes for each; the largest published runs have read 2^31 at most
MOST_SAMPLES = 1 << 34


@frozen
class Plan(Record, HasTopology):
    """Everything that one training run needs; if it exists, a program can run it. ValueError
    otherwise.

        replace(read_plan("plan.json"), label="twice")  # Plan(label=, shape=, cluster=, topology=)

    What no engine here can train: engines.require_trainable.
    """

    label: str = option(help="name of the run folder")
    shape: ModelShape = option(help="the model")
    cluster: Cluster = option(help="the machine, with all its numbers")
    topology: Topology = option(help="how the model is spread over GPUs")
    engine: str = option(ENGINES[0], "what trains it", choices=ENGINES)
    layer: Layer | None = option(None, 'a layer of your own: "FILE.py:CLASS" in this folder')
    data: Data = option(Data, "the text")
    optimizer: Optimizer = option(Optimizer, "AdamW and its schedule")
    dropout: Dropout = option(Dropout, "shares of values that are set to 0")
    run: Run = option(Run, "length, checkpoints and what is recorded")
    # as costmodel.calibration.Calibration.kept() has them; two plans are equal whatever predicted
    # them
    calibration: Mapping[str, Any] | None = field(
        default=None,
        compare=False,
        metadata={"help": "the constants that predicted it: name, hash, constants"},
    )

    def __post_init__(self) -> None:
        require_label("label", self.label)
        check(self)
        t = self.topology
        reason = unsupported_reason(self.engine, self.shape, t) or invalid_reason(self.shape, t)
        if reason := reason or first_broken(dispatcher_rules(t, self.cluster), t):
            raise ValueError(reason)
        self.cluster.gpu.flops_per_s(t.precision)
        run = self.run
        # sizes count that this plan itself trains: its part of a chain may be what no other number
        # of replicas can
        phases = run.ramp.between(t.gbs, run.start_iteration, run.goal)
        run.ramp.require_whole(t, phases)

    def rules(self) -> Rules:
        """What its parts ask of each other."""
        t = self.topology
        run = self.run
        # groups over two nodes are allowed: slow, but legal
        yield t.gpus <= self.cluster.max_gpus, "topology.gpus", "must not exceed the cluster"
        is_megatron = self.engine == "megatron"
        yield is_megatron or not self.layer, "layer", "the engine megatron alone trains one"
        has_experts = self.shape.experts > 0
        yield not (has_experts and self.layer), "layer", "a layer of your own has no experts"
        rule = "the engine megatron alone has Transformer Engine, and not for experts"
        yield (is_megatron and not has_experts) or run.fused != "te", "run.fused", rule
        is_cpu = self.cluster.gpu.kind == "cpu"
        rule = "must be 1 where ep is above 1 on CPUs: gloo gathers parts of one size alone"
        yield not is_cpu or t.ep == 1 or t.etp == 1, "topology.etp", rule
        # others have messages, or generators to rewind, between the operations of a layer
        plain = is_megatron and t.tp == t.cp == 1 and not self.dropout.attention
        plain = plain and not (self.layer or has_experts)
        rule = "compiles megatron's dense layers with tp=1, cp=1 and no attention dropout"
        yield plain or run.fused != "layer", "run.fused", rule
        drops = drops_hidden(self.engine, self.shape)
        rule = "engine hf-zero3 drops hidden values in GPT-2 alone"
        yield drops or not self.dropout.hidden, "dropout.hidden", rule
        kept = self.calibration
        ok = kept is None
        if isinstance(kept, Mapping):
            ok = {"name", "hash", "constants"} <= set(kept) and isinstance(kept["name"], str)
        yield ok, "calibration", "must hold name, hash and constants"
        rule = f"means more samples than {MOST_SAMPLES:,}, which can be put in an order"
        yield self.samples <= MOST_SAMPLES, "run.train_iters", rule
        yield self.validation_samples <= MOST_SAMPLES, "run.eval_iters", rule
        rule = "needs a share for validation in data.split, such as 949,50,1"
        validates = self.data.shares[1] > 0
        yield validates or not run.eval_interval, "run.eval_interval", rule

    @property
    def id(self) -> str:
        """Ten hexadecimal digits of all that changes a prediction: model, cluster, topology with
        its batch, engine.

        Plans with one id have one prediction by one calibration, whatever they are called and
        wherever they are shown.
        """
        # a field at its default is not named, so that a new one changes no id
        facts = {
            "shape": changed(self.shape),
            "cluster": changed(self.cluster),
            "topology": changed(self.topology),
            "engine": {"name": self.engine},
        }
        facts["topology"]["fp32_gradients"] = sums_in_fp32(self.engine, self.topology)
        if self.layer:
            facts["layer"] = vars(self.layer)
        return hash_of(json.dumps(facts, sort_keys=True), 10)

    @property
    def samples(self) -> int:
        """Samples that the whole run consumes, its ramp-up counted."""
        return self.run.ramp.consumed(self.run.train_iters, self.topology.gbs)

    @property
    def validation_samples(self) -> int:
        """Samples of one evaluation; 0 where there is none."""
        return self.run.eval_iters * self.topology.gbs

    def batches(self, done: int = 0) -> Iterator[Batch]:
        """The iterations that this plan trains after the first `done`, with their batch sizes and
        first samples.
        """
        skipped = self.run.skipped
        number = done
        for phase in self.run.ramp.between(self.topology.gbs, done, self.run.goal):
            for turn in range(phase.iterations):
                number += 1
                if not inside(skipped, number):
                    first = phase.first + turn * phase.gbs
                    yield Batch(number=number, first=first, gbs=phase.gbs)

    def replace(self, **changes: Any) -> "Plan":
        """The plan with other fields of its own or of its topology; `cluster` may be a name. With
        another tp, pp, cp or number of `gpus` dp follows unless it is given; the GPUs stay.

            plan.replace(tp=8, cluster="jz-h100")
        """
        sizes = vars(self.topology)
        if not changes.keys() & {"dp", "topology"}:
            gpus = changes.pop("gpus", self.gpus)
            ranks = math.prod({**sizes, **changes}[name] for name in ("tp", "pp", "cp"))
            is_whole = ranks > 0 and gpus % ranks == 0
            require(is_whole, "tp x pp x cp", ranks, f"must divide the {gpus} GPUs; or give dp")
            changes["dp"] = gpus // ranks
        own = [f.name for f in fields(self)]
        for name in changes:
            require_known("plan", name, [*own, *sizes])
        if isinstance(changes.get("cluster"), str):
            changes |= {"cluster": cluster(changes["cluster"]), "calibration": None}
        of_plan = {name: value for name, value in changes.items() if name in own}
        of_topology = {name: value for name, value in changes.items() if name in sizes}
        topology = of_plan.pop("topology", self.topology)
        plan = replace(self, topology=replace(topology, **of_topology), **of_plan)
        if plan.id != self.id and "label" not in changes:
            label = label_of(plan.shape, plan.cluster, plan.topology, plan.engine)
            return replace(plan, label=label)
        return plan

    def save(self, path: Path | str) -> Path:
        """Write the plan as a new file of JSON."""
        write_new(Path(path), json.dumps(self.to_json(), indent=1))
        return Path(path)

    def to_frame(self) -> DataFrame:
        """A row: its label, engine, cluster, topology and model."""
        import pandas as pd

        names = {"id": self.id, "label": self.label, "engine": self.engine}
        names["cluster"] = self.cluster.name
        return pd.DataFrame([{**names, **vars(self.topology), **vars(self.shape)}])

    def to_json(self) -> dict[str, Any]:
        """The plan as the JSON object of plan.json."""
        values = to_mapping(self).items()
        return {name: value for name, value in values if value is not None}


def plan_of(shape: ModelShape, cluster: Cluster, engine: str, choices: dict[str, Any]) -> Plan:
    """The plan of these choices, with the defaults of cluster and engine for what they
    leave open.
    """
    topology = default_topology(shape, cluster, engine, **choices)
    label = label_of(shape, cluster, topology, engine)
    return Plan(label=label, shape=shape, cluster=cluster, topology=topology, engine=engine)


def plan_from_json(values: dict[str, Any]) -> Plan:
    """The plan of a JSON object; what results of a search carry beside it (`id`, `costs`, ...) is
    set aside.
    """
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name not in DERIVED}
    return from_mapping(Plan, values, "plan")


def locate_plan(path: Path | str) -> tuple[Path, str]:
    """The file and the name of `FILE`, `FILE:NAME`, or of a folder that holds a plan.json."""
    whole = Path(path)
    if whole.is_dir():
        return whole / "plan.json", ""
    file, _, name = str(path).rpartition(":")
    if Path(file).is_file():
        return Path(file), name
    return whole, ""


def read_plan_values(path: Path | str) -> dict[str, Any]:
    """The JSON object of one plan in `path`, whatever stands next to the plan's fields; see
    read_plan().

    A layer that it names holds the text of its file, so that the plan is all that a run needs.
    """
    file, name = locate_plan(path)
    found = read_json(file, "plan")
    risky = None
    if isinstance(found, dict):
        risky = found.get("risky")
        found = found.get("plan", found.get("plans", found))
    plans = found if isinstance(found, list) else [found]
    if name and isinstance(risky, list):  # the best plan is a safe one
        plans = plans + risky
    plans = [plan for plan in plans if isinstance(plan, dict)]
    if name:
        plans = [plan for plan in plans if name in (plan.get("id"), plan.get("label"))]
    rule = "must hold a plan as a JSON object, or several as `plans`; one of that id or label"
    require(bool(plans), "plan", path, rule)
    values: dict[str, Any] = plans[0]
    layer = values.get("layer")
    if layer and isinstance(layer, str):
        return {**values, "layer": vars(read_layer(layer, file.parent))}
    return values


def read_plan(path: Path | str | Plan) -> Plan:
    """The plan in the JSON file `path`, or the plan itself; ValueError where it is missing,
    malformed or impossible.

        read_plan("plans.json:tp4-pp12-dp8-mbs2")

    `path` is a plan.json or the folder that holds it, or anything that a command or notebook 02
    writes: an object with `plan`, or with `plans`, of which the first (a search's best) is taken
    unless FILE:ID or FILE:LABEL names another.
    """
    if isinstance(path, Plan):
        return path
    return plan_from_json(read_plan_values(path))
