"""One plan: what limits its time and memory, how sure that is; changed by hand."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.engines import label_of
from trilane.config.parallelism import invalid_reason
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, Prediction, predict
from trilane.costmodel.shipped import constants_of
from trilane.planning.search_result import Candidate
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import Record, Text
from trilane.utils.validation import require
from trilane.workspace.study import Study


@dataclass(frozen=True, kw_only=True)
class Explanation(Record):
    """What decides the seconds and the memory of a plan, and what measurements support it."""

    plan: Plan
    prediction: Prediction

    @property
    def shares(self) -> dict[str, float]:
        """Shares of an iteration by part, the largest first."""
        time = self.prediction.time
        shares = {name.replace("_", " "): s / time.total for name, s in vars(time).items() if s}
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    @property
    def fullest(self) -> tuple[int, str, float]:
        """The pipeline stage that needs the most memory, its largest part, and that part's share of
        it.
        """
        totals = [stage.total for stage in self.prediction.stages]
        number = totals.index(max(totals))
        parts = vars(self.prediction.stages[number])
        part = max(parts, key=parts.__getitem__)
        return number, part, parts[part] / totals[number]

    @property
    def sentences(self) -> list[str]:
        """What limits the plan, how sure that is, on what it rests."""
        p = self.prediction
        time = ", ".join(f"{name} {share:.0%}" for name, share in list(self.shares.items())[:3])
        sent = (p.time.tensor_parallel + p.time.pipeline_p2p + p.time.data_parallel) / p.time.total
        number, part, share = self.fullest
        need = p.memory_bytes / 2**30
        card = self.plan.cluster.gpu.memory_bytes / 2**30
        seconds = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
        sentences = [
            f"Time: {time} of an iteration; all communication takes {sent:.0%}.",
            f"Memory: {need:.1f} of {card:.1f} GiB on stage {number} of {len(p.stages)}, most of it"
            f" {part} ({share:.0%}).",
            f"How sure: 9 of 10 such runs take {seconds} s; P(OOM) {p.oom_probability:.2f}.",
            f"Support: {p.support.words}.",
        ]
        return sentences

    def summary(self) -> Text:
        return Text.joined("\n", [Text.of("- {}", line) for line in self.sentences])

    def _repr_markdown_(self) -> str:
        return self.summary()

    def to_json(self) -> dict[str, Any]:
        """Shares of an iteration, and the sentences."""
        return {"shares": self.shares, "sentences": self.sentences}


def explain(plan: Plan | Path | str, calibration: Calibration | str | None = None) -> Explanation:
    """Why a plan takes what it takes.

    explain(search(shape, cluster, gpus=384, gbs=2048).candidates[0].plan)
    """
    plan = read_plan(plan)
    return Explanation(plan=plan, prediction=predict(plan, calibration=calibration))


def varied(
    base: Plan, calibration: Calibration | None, *, engine: str = "", **changes: Any
) -> Candidate:
    """The plan with other fields of its topology, or by another engine, without a ramp of the
    batch, predicted.

    Raises ValueError with the rule by which a search refuses it.
    """
    plan = base
    engine = engine or base.engine
    topology = replace(base.topology, **changes)
    if (topology, engine) != (base.topology, base.engine):
        reason = invalid_reason(base.shape, topology, base.cluster)
        if reason:
            raise ValueError(reason)
        label = label_of(base.shape, base.cluster, topology, engine)
        if topology.gbs != base.topology.gbs:
            label += f"-gbs{topology.gbs}"
        # the sizes of a ramp need not be multiples of the new mbs x dp
        plan = replace(base, topology=topology, engine=engine, label=label, run=Run())
    p = predict(plan, calibration)
    rule = f"must fit the card, which has {plan.cluster.gpu.memory_bytes / 2**30:.3g} GiB"
    needed = f"{p.memory_bytes / 2**30:.3g} GiB"
    require(p.oom_probability <= IMPOSSIBLE, "memory", needed, rule)
    return Candidate(plan=plan, prediction=p)


def use_plan(study: Study, chosen: Candidate, calibration: Calibration) -> Path:
    """Put the plan first in the study's plans.json, where 03 and 07 begin; the earlier file is kept
    in `earlier/`.

    Raises ValueError where 02_topology wrote none yet, and where it is of another model, machine or
    calibration.
    """
    values = study.values("plans.json", "02_topology")
    for kept in values["plans"][:1]:
        other = plan_from_json(kept)
        ours = (chosen.plan.shape, chosen.plan.cluster, calibration.hash)
        is_same = (other.shape, other.cluster, constants_of(other).hash) == ours
        rule = "is of another model, machine or calibration; run the last cell of 02_topology"
        require(is_same, "plans.json", study.name, rule)
    entry = chosen.to_json()
    changed = {**values, "chosen_by_hand": entry["id"]}
    for name in ("plans", "risky"):
        changed[name] = [e for e in values.get(name, []) if e["id"] != entry["id"]]
    changed["plans"].insert(0, entry)
    return study.save("plans.json", changed, "02_topology")
