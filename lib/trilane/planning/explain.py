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
        parts = {
            k.replace("_", " "): v / self.prediction.time.total
            for k, v in vars(self.prediction.time).items()
        }
        return dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda part: -part[1]))

    @property
    def fullest(self) -> tuple[int, str, float]:
        """The pipeline stage that needs the most memory, its largest part, and that part's share of
        it.
        """
        number, stage = max(enumerate(self.prediction.stages), key=lambda pair: pair[1].total)
        part, size = max(vars(stage).items(), key=lambda pair: pair[1])
        return number, part, size / stage.total

    def as_lines(self) -> list[str]:
        """What limits the plan, how sure that is, on what it rests, in sentences."""
        reason = untrainable_reason(self.plan.topology)
        return [*[f"Predicted only: {reason}."] * bool(reason), *self._limits(), *self._sure()]

    def _repr_markdown_(self) -> str:
        return Text.joined("\n", [Text.of("- {}", line) for line in self.as_lines()])

    def to_json(self) -> dict[str, Any]:
        """Shares, the fullest stage, the nearest measured runs, and the sentences."""
        return {
            "shares": self.shares,
            "memory": dict(zip(("stage", "part", "share"), self.fullest, strict=True)),
            "predicted_only": untrainable_reason(self.plan.topology),
            "measured": {
                "nearest": self.prediction.support.nearest,
                "differs": self.prediction.support.differs,
            },
            "sentences": self.as_lines(),
        }

    def _limits(self) -> list[str]:
        p, (number, part, share) = self.prediction, self.fullest
        words = ", ".join(f"{name} {share:.0%}" for name, share in list(self.shares.items())[:3])
        where = f"stage {number} of {len(p.stages)} decides" if len(p.stages) > 1 else "one GPU"
        need, card = p.memory_bytes / 2**30, self.plan.cluster.gpu.memory_bytes / 2**30
        sent = (p.time.tensor_parallel + p.time.pipeline_p2p + p.time.data_parallel) / p.time.total
        time = f"Time: {words} of an iteration; all communication takes {sent:.0%}."
        return [
            time,
            f"Memory: {where}, {need:.1f} of {card:.1f} GiB, most of it {part} ({share:.0%}).",
        ]

    def _sure(self) -> list[str]:
        p = self.prediction
        words = (
            ("almost certainly fits", SAFE),
            ("very probably fits", RISKY),
            ("may run out of", IMPOSSIBLE),
        )
        fits = next(
            (text for text, most in words if p.oom_probability <= most), "probably runs out of"
        )
        seconds = f"{p.sec_lo:.4g} to {p.sec_hi:.4g} s (within {p.sec_hi / p.sec_per_it - 1:.0%})"
        sure = f"How sure: 9 of 10 such runs take {seconds}; it {fits} memory (P(OOM) {p.oom_probability:.2f})."
        others = ", ".join(f"{row} ({distance:.1f})" for row, distance in p.support.nearest[1:])
        return [sure, f"Support: {p.support.words}{f'; then {others}' if others else ''}."]


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
    plan, engine, topology = base, engine or base.engine, replace(base.topology, **changes)
    if (topology, engine) != (base.topology, base.engine):
        if reason := invalid_reason(base.shape, topology, base.cluster):
            raise ValueError(reason)
        label = label_of(base.shape, base.cluster, topology, engine)
        label += f"-gbs{topology.gbs}" * (topology.gbs != base.topology.gbs)
        # the sizes of a ramp need not be multiples of the new mbs x dp
        plan = replace(base, topology=topology, engine=engine, label=label, run=Run())
    p, card = predict(plan, calibration), plan.cluster.gpu.memory_bytes / 2**30
    needed = f"{p.memory_bytes / 2**30:.3g} GiB"
    require(
        p.oom_probability <= IMPOSSIBLE,
        "memory",
        needed,
        f"must fit the card, which has {card:.3g} GiB",
    )
    return Candidate(plan=plan, prediction=p)


def use_plan(study: Study, chosen: Candidate, calibration: Calibration) -> Path:
    """Put the plan first in the study's plans.json, where 03 and 07 begin; the earlier file is kept
    in `earlier/`.

    Raises ValueError where 02_topology wrote none yet, and where it is of another model, machine or
    calibration.
    """

    def first(found: dict[str, Any]) -> dict[str, Any]:
        for kept in found["plans"][:1]:
            other = plan_from_json(kept)
            same = (other.shape, other.cluster) == (chosen.plan.shape, chosen.plan.cluster)
            is_its = same and constants_of(other).hash == calibration.hash
            what = "" if is_its else "calibration" if same else "model or machine"
            require(
                not what,
                "plans.json",
                study.name,
                f"is of another {what}; run the last cell of 02_topology",
            )
        entry = chosen.to_json()
        lists = {
            name: [e for e in found.get(name, []) if e["id"] != entry["id"]]
            for name in ("plans", "risky")
        }
        return {**found, **lists, "plans": [entry, *lists["plans"]], "chosen_by_hand": entry["id"]}

    return study.update("plans.json", "02_topology", first)
