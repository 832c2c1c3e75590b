"""Plan: shape + cluster + topology + engine + data + run limits. One JSON file, the engine's only
input.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trilane.config.batch_rampup import Batch
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, drops_hidden, sums_in_fp32, unsupported_reason
from trilane.config.layer import Layer, read_layer
from trilane.config.model import ModelShape
from trilane.config.options import changed, check, option
from trilane.config.parallelism import CLUSTER_RULES, Topology, first_broken, invalid_reason
from trilane.config.training import Data, Dropout, Optimizer, Run, inside
from trilane.utils.tables import Record
from trilane.utils.validation import from_mapping, read_json, require, require_label, to_mapping

# What results write next to the fields of a plan: derived from it, so never read back.
DERIVED = (
    "id",
    "prediction",
    "parameters",
    "tflops",
    "mfu",
    "hfu",
    "days",
    "measured",
    "traced",
    "why",
    "costs",
)


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Everything that one training run needs; if it exists, a program can run it. ValueError
    otherwise.

        replace(read_plan("plan.json"), label="twice")  # Plan(label=, shape=, cluster=, topology=)

    What the engines here cannot train yet: engines.untrainable_reason.
    """

    label: str = option(help="name of the run folder")
    shape: ModelShape = option(help="the model")
    cluster: Cluster = option(help="the machine, with all its numbers")
    topology: Topology = option(help="how the model is spread over GPUs")
    engine: str = option(ENGINES[0], "what trains it", choices=ENGINES)
    layer: Layer | None = option(
        None, 'a layer of your own: "FILE.py:CLASS" in this folder, or "package.module:CLASS"'
    )
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
        # groups over two nodes are allowed: slow, but legal
        reason = reason or first_broken(CLUSTER_RULES[:1], t, self.cluster)
        if reason:
            raise ValueError(reason)
        self.cluster.gpu.flops_per_s(t.precision)
        rule = (
            f"engine {self.engine} trains megatron-core's layer; `megatron` trains one of your own"
        )
        require(not self.layer or self.engine == "megatron", "layer", self.layer, rule)
        rule = f"engine {self.engine} has no Transformer Engine"
        require(self.run.fused != "te" or self.engine == "megatron", "run.fused", "te", rule)
        # others have messages, or generators to rewind, between the operations of a layer
        plain = (self.engine, t.tp, t.cp, self.dropout.attention, self.layer) == (
            ENGINES[0],
            1,
            1,
            0.0,
            None,
        )
        rule = "compiles layers of engine megatron with tp=1, cp=1, no attention dropout, none of your own"
        require(self.run.fused != "layer" or plain, "run.fused", "layer", rule)
        drops = drops_hidden(self.engine, self.shape)
        rule = "engine hf-zero3 drops hidden values in GPT-2 alone: transformers' other models do not, or not all"
        require(drops or not self.dropout.hidden, "dropout.hidden", self.dropout.hidden, rule)
        run, part = self.run, None
        # sizes count that this plan itself trains: its part of a chain may be what no other number
        # of replicas can
        if run.start_iteration + run.exit_iteration > 0:
            part = {phase.gbs for phase in run.ramp.between(t.gbs, run.start_iteration, run.goal)}
        run.ramp.require_whole(t, part)
        kept, parts = self.calibration, {"name": str, "hash": str, "constants": Mapping}
        is_whole = isinstance(kept, Mapping) and all(
            isinstance(kept.get(n), kind) for n, kind in parts.items()
        )
        require(
            kept is None or is_whole,
            "calibration",
            str(kept)[:40],
            "must hold name, hash and constants",
        )
        # the order is kept as some bytes for each; the largest published runs have read 2^31 at
        # most
        most = 1 << 34
        for name, count in {
            "train_iters": self.samples,
            "eval_iters": self.validation_samples,
        }.items():
            rule = f"means {count:,} samples, at most {most:,} can be put in an order"
            require(count <= most, name, getattr(self.run, name), rule)
        evaluates, rule = (
            self.run.eval_interval,
            "needs a share for validation in data.split, such as 949,50,1",
        )
        require(not evaluates or self.data.shares[1] > 0, "eval_interval", evaluates, rule)

    @property
    def id(self) -> str:
        """Ten hexadecimal digits of all that changes a prediction: model, cluster, topology with
        its batch, engine.

        Plans with one id have one prediction by one calibration, whatever they are called and
        wherever they are shown.
        """
        # a field at its default is not named, so that a new one changes no id
        topology = {
            **changed(self.topology),
            "fp32_gradients": sums_in_fp32(self.engine, self.topology),
        }
        facts = {
            "shape": changed(self.shape),
            "cluster": changed(self.cluster),
            "topology": topology,
        }
        facts["engine"] = {"name": self.engine}
        facts |= {"layer": vars(self.layer)} if self.layer else {}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]

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
        every = self.run.ramp.batches(self.run.goal, self.topology.gbs, done)
        return (batch for batch in every if not inside(skipped, batch.number))

    def to_json(self) -> dict[str, Any]:
        """The plan as the JSON object of plan.json."""
        return {
            name: value
            for name, value in to_mapping(self).items()
            if name not in ("calibration", "layer") or value
        }


def plan_from_json(values: dict[str, Any]) -> Plan:
    """The plan of a JSON object; what results of a search carry beside it (`id`, `costs`, ...) is
    set aside.
    """
    fields = (
        {k: v for k, v in values.items() if k not in DERIVED}
        if isinstance(values, dict)
        else values
    )
    return from_mapping(Plan, fields, "plan")


def locate_plan(path: Path | str) -> tuple[Path, str]:
    """The file and the name of `FILE`, `FILE:NAME`, or of a folder that holds a plan.json."""
    whole = Path(path)
    if whole.is_dir():
        require((whole / "plan.json").is_file(), "plan", path, "is a folder without plan.json")
        return whole / "plan.json", ""
    file, colon, name = str(path).rpartition(":")
    return (
        (Path(file), name) if colon and not whole.exists() and Path(file).exists() else (whole, "")
    )


def read_plan_values(path: Path | str) -> dict[str, Any]:
    """The JSON object of one plan in `path`, whatever stands next to the plan's fields; see
    read_plan().

    A layer that it names holds the text of its file, so that the plan is all that a run needs.
    """
    file, name = locate_plan(path)
    values = _one_plan(path, file, name)
    layer = values.get("layer")
    return (
        {**values, "layer": vars(read_layer(layer, file.parent))}
        if isinstance(layer, str) and layer
        else values
    )


def _one_plan(path: Path | str, file: Path, name: str) -> dict[str, Any]:
    values = read_json(file, "plan")
    if isinstance(values, dict) and "shape" not in values:
        values = values.get("plan", values.get("plans", values))
    rule = "must hold a plan as a JSON object, or several as `plans`"
    require(
        all(isinstance(v, dict) for v in (values if isinstance(values, list) else [values])),
        "plan",
        file,
        rule,
    )
    if not isinstance(values, list):
        require(not name, "plan", path, f"{file} holds one plan")
        return values
    require(bool(values), "plan", path, "holds no plan")
    if not name:
        return values[0]
    named = [v for v in values if name in (v.get("id"), v.get("label"))]
    known = ", ".join(f"{v.get('id')} ({v.get('label')})" for v in values)
    require(bool(named), "plan", path, f"names none of {known}")
    return named[0]


def read_plan(path: Path | str | Plan) -> Plan:
    """The plan in the JSON file `path`, or the plan itself; ValueError where it is missing, malformed or impossible.

        read_plan("plans.json:tp4-pp12-dp8-mbs2")

    `path` is a plan.json or the folder that holds it, or anything that a command or notebook 02
    writes: an object with `plan`, or with `plans`, of which the first (a search's best) is taken
    unless FILE:ID or FILE:LABEL names another.
    """
    if isinstance(path, Plan):
        return path
    return plan_from_json(read_plan_values(path))
