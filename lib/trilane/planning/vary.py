"""A plan changed by hand or by question: its prediction or the rule that forbids it, what if."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import label_of
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan, plan_from_json
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, predict
from trilane.costmodel.shipped import calibration_of, default
from trilane.planning.search import search_space
from trilane.planning.search_result import Candidate
from trilane.planning.space import Space
from trilane.utils.tables import DataFrame, Table, frame_of
from trilane.utils.validation import require
from trilane.workspace.study import Study

FIELDS = tuple(f.name for f in fields(Topology))


def varied(base: Plan, calibration: Calibration | None, *, engine: str = "", **changes: Any) -> Candidate:
    """The plan with other fields of its topology, or by another engine, without a ramp of the batch, predicted.

    Raises ValueError with the rule by which a search refuses it.
    """
    plan, engine, topology = base, engine or base.engine, replace(base.topology, **changes)
    if (topology, engine) != (base.topology, base.engine):
        if reason := invalid_reason(base.shape, topology, base.cluster):
            raise ValueError(reason)
        label = label_of(base.shape, base.cluster, topology, engine)
        label += f"-gbs{topology.gbs}" * (topology.gbs != base.topology.gbs)
        plan = replace(base, topology=topology, engine=engine, label=label, run=Run())
    p, card = predict(plan, calibration), plan.cluster.gpu.memory_bytes / 2**30
    needed = f"{p.memory_bytes / 2**30:.3g} GiB"
    require(p.oom_probability <= IMPOSSIBLE, "memory", needed, f"must fit the card, which has {card:.3g} GiB")
    return Candidate(plan=plan, prediction=p)


def word(value: Any) -> Any:
    """A value as people read it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def use_plan(study: Study, chosen: Candidate, calibration: Calibration) -> Path:
    """Put the plan first in the study's plans.json, where 03 and 07 begin; the earlier file is kept in `earlier/`.

    Raises ValueError where 02_topology wrote none yet, and where it is of another model, machine or calibration.
    """

    def first(found: dict[str, Any]) -> dict[str, Any]:
        for kept in found["plans"][:1]:
            other, used = plan_from_json(kept), calibration_of(kept, chosen.plan.cluster)
            same = (other.shape, other.cluster) == (chosen.plan.shape, chosen.plan.cluster)
            what = "" if same and used.hash == calibration.hash else "calibration" if same else "model or machine"
            require(not what, "plans.json", study.name, f"is of another {what}; run the last cell of 02_topology")
        entry = chosen.to_json()
        lists = {name: [e for e in found.get(name, []) if e["id"] != entry["id"]] for name in ("plans", "risky")}
        return {**found, **lists, "plans": [entry, *lists["plans"]], "chosen_by_hand": entry["id"]}

    return study.update("plans.json", "02_topology", first)


@dataclass(frozen=True, kw_only=True)
class WhatIf(Table):
    """The best plan for each change; None where nothing can run then. "as it is" comes first."""

    best: dict[str, Candidate | None]

    def to_frame(self) -> DataFrame:
        """A row for each change under which some plan can run: the best one, its seconds, and how these change."""
        able = [(change, c.label, c.prediction.sec_per_it) for change, c in self.best.items() if c is not None]
        columns: dict[str, Any] = {
            "what": lambda row: row[0],
            "best plan": lambda row: row[1],
            "s/it": lambda row: round(row[2], 3),
            "change": lambda row: f"{row[2] / able[0][2] - 1:+.1%}",
        }
        return frame_of(able, columns)


def what_if(shape: ModelShape, cluster: Cluster, space: Space, calibration: Calibration | None = None) -> WhatIf:
    """The best plan as it is, and with other links, a node less, one microbatch size, launches blocked or not.

    what_if(shape, cluster, search(shape, cluster, gpus=384, gbs=2048).space)
    """
    known = calibration or default(cluster)
    changed = {
        "as it is": (cluster, space, known),
        "network at half its speed": (_scaled(cluster, network_bytes_per_s=0.5), space, known),
        "network at twice its speed": (_scaled(cluster, network_bytes_per_s=2.0), space, known),
        "node bus at half its speed": (_scaled(cluster, node_bytes_per_s=0.5), space, known),
        "memory rate up by a tenth": (_scaled(cluster, gpu_rate=1.1), space, known),
    }
    fewer = tuple(g - cluster.gpus_per_node for g in space.gpus if g > cluster.gpus_per_node)
    if fewer and not {"tp", "pp", "dp"} <= {*space.pins}:
        changed["one node less"] = (cluster, replace(space, gpus=fewer), known)
    for mbs in (1, 2, 4, 8):
        changed[f"mbs {mbs}"] = (cluster, replace(space, pins={**space.pins, "mbs": (mbs,)}), known)
    for blocking in (True, False) if cluster.gpu.kind == "cuda" else ():
        changed[f"CUDA_LAUNCH_BLOCKING={int(blocking)}"] = (cluster, space, known.with_launch_blocking(blocking))
    results = {name: search_space(shape, *given, top=1).candidates for name, given in changed.items()}
    return WhatIf(best={name: found[0] if found else None for name, found in results.items()})


def _scaled(cluster: Cluster, gpu_rate: float = 1.0, **factors: float) -> Cluster:
    gpu = replace(cluster.gpu, memory_bytes_per_s=cluster.gpu.memory_bytes_per_s * gpu_rate)
    if "network_bytes_per_s" in factors and cluster.ring_bytes_per_s:
        factors["ring_bytes_per_s"] = factors["network_bytes_per_s"]
    return replace(cluster, gpu=gpu, **{n: getattr(cluster, n) * f for n, f in factors.items()})
