"""One plan changed by hand: its prediction or the rule that forbids it, several side by side, one chosen to go on."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.engines import ENGINES, label_of
from trilane.config.parallelism import CHOICES, Topology, invalid_reason
from trilane.config.plan import Plan, plan_from_json
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, predict
from trilane.costmodel.shipped import calibration_of
from trilane.planning.search_result import Candidate
from trilane.planning.space import divisors
from trilane.utils.tables import Html
from trilane.utils.validation import require
from trilane.workspace.study import Study

FIELDS = tuple(f.name for f in dataclasses.fields(Topology))
SIZES = ("tp", "pp", "dp", "cp")


def varied_plan(base: Plan, *, engine: str = "", **fields: Any) -> Plan:
    """The plan with other fields of its topology, or by another engine, without a ramp of the batch.

    Raises ValueError with the rule by which a search refuses it.
    """
    topology, engine = dataclasses.replace(base.topology, **fields), engine or base.engine
    if (topology, engine) == (base.topology, base.engine):
        return base
    if reason := invalid_reason(base.shape, topology, base.cluster):
        raise ValueError(reason)
    label = label_of(base.shape, base.cluster, topology, engine)
    label += f"-gbs{topology.gbs}" * (topology.gbs != base.topology.gbs)
    return dataclasses.replace(base, topology=topology, engine=engine, label=label, run=Run())


def varied(base: Plan, calibration: Calibration | None, *, engine: str = "", **fields: Any) -> Candidate:
    """As varied_plan(), predicted; ValueError also where the search would refuse it for its memory."""
    plan = varied_plan(base, engine=engine, **fields)
    p, card = predict(plan, calibration), plan.cluster.gpu.memory_bytes / 2**30
    needed = f"{p.memory_bytes / 2**30:.3g} GiB"
    require(p.oom_probability <= IMPOSSIBLE, "memory", needed, f"must fit the card, which has {card:.3g} GiB")
    return Candidate(plan=plan, prediction=p)


def possible(base: Plan, field: str, *, engine: str = "", **fields: Any) -> list[Any]:
    """The values of one field that no rule refuses, all others as given; memory is not asked."""
    chosen = {**vars(base.topology), **fields}
    found = []
    for value in _values(base, field, chosen):
        try:
            varied_plan(base, **{"engine": engine, **fields, field: value})
        except ValueError:
            continue
        found.append(value)
    return found


def _values(base: Plan, field: str, chosen: dict[str, Any]) -> Iterable[Any]:
    """What may be tried for a field; nothing for what is no field."""
    layers, gbs, dp = base.shape.num_layers, chosen["gbs"], chosen["dp"]
    if field in SIZES:
        return sorted({*divisors(base.topology.gpus), *divisors(layers)})
    if field == "gbs":
        step = chosen["mbs"] * dp * (chosen["pp"] if chosen["interleaving"] > 1 else 1)
        return [n for n in (gbs // step * step, gbs // step * step + step) if n]
    known: dict[str, Iterable[Any]] = {"zero": range(4), "interleaving": divisors(layers), "engine": ENGINES}
    known |= {"mbs": [m for m in divisors(gbs) if m <= 64], **CHOICES}
    flags = {name for name, value in vars(base.topology).items() if isinstance(value, bool)}
    return (False, True) if field in flags else known.get(field, ())


@dataclass(frozen=True, kw_only=True)
class WhatIfs:
    """Plans side by side, the first the one that the others are compared with."""

    rows: tuple[Candidate, ...]

    def _repr_html_(self) -> Html:
        """A column a plan: the fields in which they differ, and what is predicted; what differs is marked."""
        choices = [{"engine": c.plan.engine, **vars(c.topology)} for c in self.rows]
        differing = [name for name in choices[0] if any(each[name] != choices[0][name] for each in choices)]
        lines: list[tuple[str, Sequence[Any]]] = [(_words(n), [_value(each[n]) for each in choices]) for n in differing]
        lines += [
            ("GPUs", [c.topology.gpus for c in self.rows]),
            *_predicted(self.rows),
            ("id", [c.plan.id for c in self.rows]),
        ]
        head = Html.joined("", [Html.of("<th>{}</th>", name) for name in ("", *(c.label for c in self.rows))])
        body = Html.joined("", [_row(name, values) for name, values in lines])
        return Html.of("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, body)


def _row(name: str, values: Sequence[Any]) -> Html:
    marked = [Html.of("<mark>{}</mark>", v) if v != values[0] else v for v in values]
    cells = Html.joined("", [Html.of("<td>{}</td>", v) for v in marked])
    return Html.of("<tr><th>{}</th>{}</tr>", name, cells)


def _words(name: str) -> str:
    return name if len(name) < 4 else name.replace("_", " ")


def _value(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _predicted(rows: Sequence[Candidate]) -> list[tuple[str, list[str]]]:
    """Lines of what is predicted: the seconds with their interval and against the first, memory, the bubble."""
    p, first = [c.prediction for c in rows], rows[0].prediction.sec_per_it
    return [
        ("s an iteration", [f"{x.sec_per_it:.4g}" for x in p]),
        ("90 %", [f"{x.sec_lo:.3g} to {x.sec_hi:.3g}" for x in p]),
        ("against the first", [f"{x.sec_per_it / first - 1:+.1%}" for x in p]),
        ("memory (GiB)", [f"{x.memory_bytes / 2**30:.3g}" for x in p]),
        ("P(out of memory)", [f"{x.oom_probability:.1%}" for x in p]),
        ("bubble", [f"{x.time.bubble / x.sec_per_it:.1%}" for x in p]),
    ]


def use_plan(study: Study, chosen: Candidate, calibration: Calibration) -> Path:
    """Put the plan first in the study's plans.json, where 03 and 07 begin; the earlier file is kept in `earlier/`.

    Raises ValueError where 02_topology wrote none yet, and where it is of another model, machine or calibration.
    """

    def first(found: dict[str, Any]) -> dict[str, Any]:
        for other in map(plan_from_json, found["plans"][:1]):
            same = (other.shape, other.cluster) == (chosen.plan.shape, chosen.plan.cluster)
            require(same, "plans.json", study.name, "is of another model or machine; run the last cell of 02_topology")
        used = [calibration_of(each, chosen.plan.cluster).hash for each in found["plans"][:1]]
        same = used in ([], [calibration.hash])
        require(same, "plans.json", study.name, "is by another calibration; run the last cell of 02_topology")
        entry = chosen.to_json()
        lists = {name: [e for e in found.get(name, []) if e["id"] != entry["id"]] for name in ("plans", "risky")}
        return {**found, **lists, "plans": [entry, *lists["plans"]], "chosen_by_hand": entry["id"]}

    return study.update("plans.json", "02_topology", first)
