"""Studies side by side: one table of what was chosen and predicted in each, their runs, losses and speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from trilane.analysis.collect import MeasuredRuns, measure_runs
from trilane.analysis.compare import compare
from trilane.analysis.loss_curve import Curve
from trilane.analysis.measure import Measurement
from trilane.utils.numbers import percent, with_interval
from trilane.utils.tables import Columns, Html, Text, one_line, show
from trilane.utils.validation import read_object, require
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import Study

FOUND = ("prediction", "forecast", "decision")  # parts that hold results
NUMBERS = ("cluster", "planner's constants")  # parts with numbers that nobody chose


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """What one study holds: all that was chosen and found, by part and name; its plans and runs; what it lacks."""

    name: str
    facts: Mapping[tuple[str, str], str]
    plans: list[dict[str, Any]]
    runs: MeasuredRuns
    lacks: tuple[str, ...]

    def fastest(self) -> list[Measurement]:
        """The runs of its fastest topology; [] without a timed run."""
        timed = sorted((m for m in self.runs.timed if m.sec_per_it > 0), key=lambda m: m.sec_per_it)
        return [m for m in timed if m is timed[0] or (m.plan and timed[0].plan and m.plan.id == timed[0].plan.id)]


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """Studies side by side, in the order in which they were named."""

    studies: tuple[StudyParts, ...]

    def summary(self) -> Text:
        """What is compared, and what a study lacks, a line each."""
        lines = [Text.of("Compared: {}.", Text.joined(", ", [Text.of("{:code}", s.name) for s in self.studies]))]
        lines += [Text.of("{} lacks {}.", s.name, "; ".join(s.lacks)) for s in self.studies if s.lacks]
        lines += [Text("It is the only study here; name two or more: `-p studies a,b`.")] * (len(self.studies) < 2)
        return Text.joined("\n\n", lines)

    def table(self, differ: bool, *parts: str) -> pd.DataFrame:
        """A row for each part and choice, a column for each study; those that differ, or those that do not."""
        names = dict.fromkeys(name for s in self.studies for name in s.facts)
        order = list(dict.fromkeys(part for part, _ in names))
        rows = sorted(names, key=lambda name: order.index(name[0]))
        index = pd.MultiIndex.from_tuples(rows, names=["part", "choice"])
        table = pd.DataFrame({s.name: pd.Series(s.facts, dtype=object).reindex(index) for s in self.studies}, index)
        has_part = table.notna().groupby("part").transform("any")
        # what a notebook was not given is its default
        table = table.where(has_part, "lacks it").fillna("default")[has_part.sum(axis=1) > 1]
        kept = (table[table != "lacks it"].nunique(axis=1) > 1) == differ
        chosen = table.index.get_level_values("part").isin(parts)
        return table[kept & (chosen if parts else True)].reset_index()

    def differences(self) -> Columns | Text:
        """What differs of what somebody chose: a row a choice, a column a study."""
        table = self.table(True)
        table = table[~table["part"].isin([*FOUND, *NUMBERS])].reset_index(drop=True)
        none = Text("They differ in no parameter, model, cluster, plan or training that two of them have.")
        return Columns(table) if len(table) else none

    def results(self) -> Columns | Text:
        """What differs of what was found: the best plan's prediction, the calendar, the decision."""
        table = self.table(True, *FOUND)
        return Columns(table) if len(table) else Text("No two studies have a prediction, or it is the same.")

    def folded(self) -> Html:
        """Numbers of the cluster and of the planner that differ, and what is equal: both folded."""
        groups = {"numbers of the cluster and of the planner differ": self.table(True, *NUMBERS)}
        groups["choices are equal"] = self.table(False)
        folded = "<details><summary>{} {}</summary>{}</details>"
        return Html.joined("\n", [Html.of(folded, len(rows), words, show(rows)) for words, rows in groups.items()])

    def runs(self) -> Columns | Text:
        """The runs of all studies, a row each."""
        tables = {s.name: s.runs.to_frame() for s in self.studies if s.runs.runs}
        if not tables:
            return Text("No study has a run.")
        return Columns(pd.concat(tables, names=["Study"]).reset_index("Study").astype(object).fillna(""))

    def faster(self) -> Text:
        """Whether the fastest topology of a study is faster than that of another."""
        lines = []
        for a, b in combinations(self.studies, 2):
            sides = a.fastest(), b.fastest()
            without = [s.name for s, runs in zip((a, b), sides, strict=True) if not runs]
            one, other = (", ".join(m.name for m in runs) for runs in sides)
            text = Text.of("{} against {}: no timed run in {}.", b.name, a.name, " and ".join(without))
            if not without:
                text = Text.of("The fastest topology: A is {} of {}, B is {} of {}.", one, a.name, other, b.name)
                text = Text.of("{} {}", text, compare(*sides).as_text())
            lines.append(text)
        return Text.joined("\n\n", lines)

    def curves(self) -> dict[str, dict[str, Curve]]:
        """The loss curves of each study that has any, by study and run."""
        return {s.name: curves for s in self.studies if (curves := s.runs.curves())}

    def losses(self) -> Text:
        """First and last losses, a line a study."""
        lines = [Text.of("{}: {}", s.name, s.runs.loss_summary()) for s in self.studies if s.runs.runs]
        return Text.joined("\n\n", lines or [Text("No study has a run.")])

    def to_json(self) -> dict[str, Any]:
        """What comparison.json holds."""
        names = [s.name for s in self.studies]
        rows = self.table(True).to_dict("records")
        rows = [{**{k: row.pop(k) for k in ("part", "choice")}, "values": row} for row in rows]
        return {"studies": names, "lacks": {s.name: list(s.lacks) for s in self.studies}, "differences": rows}


def compare_studies(here: Study, names: str = "") -> StudyComparison:
    """The studies of these names, separated by commas; without names `here` and the study that changed last.

        compare_studies(Study.open("a"), "a,b").differences()

    Raises ValueError for a study that does not exist. What one lacks, or what is damaged in it, is reported instead.
    """
    chosen = list(dict.fromkeys(name for part in names.split(",") if (name := part.strip())))
    require(not names or len(chosen) > 1, "studies", names, "must be two or more, separated by commas")
    known = {p.name: p.stat().st_mtime_ns for p in outputs_root().iterdir() if (p / "index.html").is_file()}
    others = sorted((name for name in known if name != here.name), key=known.__getitem__)
    parts = []
    for name in chosen or [here.name, *others[-1:]]:
        study = Study(name)
        require(study.folder.is_dir(), "studies", name, f"no study of that name; there are {', '.join(sorted(known))}")
        parts.append(_parts(study))
        here.read |= {f"{name}/{file}": key for file, key in study.read.items()}
    return StudyComparison(studies=tuple(parts))


def plan_point(plan: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of plans.json in a figure's numbers; tokens a second with their 90 % interval."""
    t, p = plan["topology"], plan["prediction"]
    seconds, low, high = with_interval(p["sec_per_it"], p["sec_lo"], p["sec_hi"])
    rates = {"tokens_per_s": p["sec_per_it"], "low": p["sec_hi"], "high": p["sec_lo"]}
    tokens = t["gbs"] * plan["shape"]["seq_length"]
    names = {name: one_line(plan[key]) for name, key in {"plan": "label", "id": "id"}.items()}
    numbers = {"gpus": t["tp"] * t["pp"] * t["dp"] * t.get("cp", 1), "oom": percent(p["oom_probability"])}
    numbers |= {"gib": float(f"{p['memory_bytes'] / 2**30:.4g}"), "seconds": seconds, "interval": f"{low} to {high}"}
    return {**names, **numbers, **{name: float(f"{tokens / seconds:.4g}") for name, seconds in rates.items()}}


def _parts(study: Study) -> StudyParts:
    files, lacks, runs = dict[str, dict[str, Any]](), list[str](), MeasuredRuns(runs=())
    made_by = {"sizing": "01_sizing", "plans": "02_topology", "calendar": "07_calendar", "decision": "08_decision"}
    for name, notebook in made_by.items():
        try:
            found = study.load(f"{name}.json", notebook)
            # what figures and tables read of it is there
            assert name != "plans" or all(plan_point(p) and isinstance(p["cluster"], dict) for p in found["plans"])
            files[name] = found
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, AssertionError) as error:
            why = str(error) if isinstance(error, ValueError) else f"study file={name}.json: is damaged"
            lacks.append(why if (study.folder / f"{name}.json").exists() else f"{name}.json ({notebook})")
    try:
        runs = measure_runs(study)
    except ValueError as error:
        lacks.append(str(error) if study.run_folders() else "runs (03_launch)")
    facts = {(part, n): v for part, found in _facts(study, files, runs).items() for n, v in _flat(found).items()}
    plans = files.get("plans", {"plans": []})["plans"]
    return StudyParts(name=study.name, facts=facts, plans=plans, runs=runs, lacks=tuple(lacks))


def _facts(study: Study, files: Mapping[str, dict[str, Any]], runs: MeasuredRuns) -> dict[str, Any]:
    """Everything that was chosen and found, by part."""
    chosen = files.get("plans") or files.get("sizing") or {}
    best: dict[str, Any] = next(iter(files.get("plans", {}).get("plans", [])), {})
    calendar = ("plan", "tokens", "days", "days_interval", "gpu_hours", "gpu_hours_interval", "finish")
    predicted = ("sec_per_it", "sec_lo", "sec_hi", "memory_bytes", "oom_probability")
    plans = [m.plan.to_json() for m in runs.runs if m.plan]
    # several values where runs differ
    training = [_flat({p: plan[p] for p in ("engine", "data", "optimizer", "dropout", "run")}) for plan in plans]
    names = dict.fromkeys(name for one in training for name in one)
    found = {
        "model": chosen.get("shape"),
        "batch and machine": _some(chosen, ("cluster", "gpus", "gbs")),
        "best plan": best.get("topology"),
        "prediction": _some(best.get("prediction", {}), predicted),
        "cluster": best.get("cluster"),
        "planner's constants": best.get("calibration", {}).get("constants"),
        "training": {n: ", ".join(dict.fromkeys(one[n] for one in training if n in one)) for n in names},
        "forecast": _some(files.get("calendar", {}), (*calendar, "p_miss_deadline", "p_overrun_allocation")),
        "decision": files.get("decision", {}).get("recommendation"),
    }
    for path in sorted(study.folder.glob("[0-9]*.ipynb")):
        found[f"parameters of {path.stem}"] = _parameters(path)
    return found


def _some(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _flat(values: Any) -> dict[str, str]:
    """Nested values by their path, as text: {"ramp": {"start": 8}} -> {"ramp.start": "8"}."""
    flat = pd.json_normalize(values).to_dict("records")[0] if isinstance(values, dict) and values else {}
    # where numbers come from, and where data lies, is no choice
    kept = {n: v for n, v in flat.items() if not {"sources", "folder"} & {*n.split(".")}}
    texts = {name: f"{v:.6g}" if isinstance(v, float) else str(v) for name, v in kept.items()}
    return {name: "/".join(t.split("/")[-2:]) if t.startswith("/") else t for name, t in texts.items()}


def _parameters(path: Path) -> dict[str, Any]:
    """The parameters with which papermill executed a notebook, without the study; {} where they are not recorded."""
    try:
        made = read_object(path, "notebook", metadata=dict)["metadata"]["papermill"]["parameters"]
        return {name: value for name, value in dict(made).items() if name != "study"}
    except (ValueError, KeyError, TypeError):
        return {}
