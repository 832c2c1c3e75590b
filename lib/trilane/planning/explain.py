"""One plan: what limits its time and memory, how sure that is; changed by hand."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.engines import label_of, untrainable_reason
from trilane.config.parallelism import invalid_reason
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, SAFE, Prediction, predict
from trilane.costmodel.shipped import constants_of
from trilane.planning.search_result import Candidate
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
        parts = vars(self.prediction.time)
        total = self.prediction.time.total
        names = [name for name in parts if parts[name]]
        names.sort(key=lambda name: -parts[name])
        return {name.replace("_", " "): parts[name] / total for name in names}

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
        count = len(p.stages)
        if count > 1:
            where = f"stage {number} of {count} decides"
        else:
            where = "one GPU"
        need = p.memory_bytes / 2**30
        card = self.plan.cluster.gpu.memory_bytes / 2**30
        seconds = f"{p.sec_lo:.4g} to {p.sec_hi:.4g} s (within {p.sec_hi / p.sec_per_it - 1:.0%})"
        risk = f"{self.fits} memory (P(OOM) {p.oom_probability:.2f})"
        rests = p.support.words
        others = ", ".join(f"{row} ({distance:.1f})" for row, distance in p.support.nearest[1:])
        if others:
            rests += f"; then {others}"
        reason = untrainable_reason(self.plan.topology)
        sentences = [f"Predicted only: {reason}."] if reason else []
        return [
            *sentences,
            f"Time: {time} of an iteration; all communication takes {sent:.0%}.",
            f"Memory: {where}, {need:.1f} of {card:.1f} GiB, most of it {part} ({share:.0%}).",
            f"How sure: 9 of 10 such runs take {seconds}; it {risk}.",
            f"Support: {rests}.",
        ]

    @property
    def fits(self) -> str:
        """How probable it is that the memory suffices, in words."""
        probability = self.prediction.oom_probability
        if probability <= SAFE:
            return "almost certainly fits"
        if probability <= RISKY:
            return "very probably fits"
        if probability <= IMPOSSIBLE:
            return "may run out of"
        return "probably runs out of"

    def summary(self) -> Text:
        return Text.joined("\n", [Text.of("- {}", line) for line in self.sentences])

    def _repr_markdown_(self) -> str:
        return self.summary()

    def to_json(self) -> dict[str, Any]:
        """Shares, the fullest stage, the nearest measured runs, and the sentences."""
        number, part, share = self.fullest
        support = self.prediction.support
        return {
            "shares": self.shares,
            "memory": {"stage": number, "part": part, "share": share},
            "predicted_only": untrainable_reason(self.plan.topology),
            "measured": {"nearest": support.nearest, "differs": support.differs},
            "sentences": self.sentences,
        }


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

    def first(values: dict[str, Any]) -> dict[str, Any]:
        for kept in values["plans"][:1]:
            other = plan_from_json(kept)
            differs = ""
            if constants_of(other).hash != calibration.hash:
                differs = "calibration"
            if (other.shape, other.cluster) != (chosen.plan.shape, chosen.plan.cluster):
                differs = "model or machine"
            rule = f"is of another {differs}; run the last cell of 02_topology"
            require(not differs, "plans.json", study.name, rule)
        entry = chosen.to_json()
        changed = {**values, "chosen_by_hand": entry["id"]}
        for name in ("plans", "risky"):
            changed[name] = [e for e in values.get(name, []) if e["id"] != entry["id"]]
        changed["plans"].insert(0, entry)
        return changed

    return study.update("plans.json", "02_topology", first)
