"""Studies side by side: what was chosen and predicted in each, their runs and losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from trilane.analysis.collect import MeasuredRuns, measure_runs
from trilane.analysis.loss_curve import Curve
from trilane.utils.numbers import chance, with_bounds
from trilane.utils.tables import Columns, DataFrame, Record, Text
from trilane.utils.validation import read_object, require, require_known
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import Study


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """What one study holds: all that was chosen and found, by part and name; its runs; what it
    lacks.
    """

    name: str
    facts: Mapping[tuple[str, str], str]
    runs: MeasuredRuns
    lacks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StudyComparison(Record):
    """Studies side by side, in the order in which they were named."""

    studies: tuple[StudyParts, ...]

    def summary(self) -> Text:
        """How many choices and results differ, and what each study lacks."""
        names = Text.joined(", ", [Text.of("{:code}", s.name) for s in self.studies])
        lines = [
            Text.of("**{} choices and results** differ between {}.", len(self.differing), names)
        ]
        lines += [
            Text.of("{} lacks {}.", s.name, "; ".join(s.lacks)) for s in self.studies if s.lacks
        ]
        return Text.joined("\n\n", lines)

    @cached_property
    def differing(self) -> list[dict[str, str]]:
        """A row for each choice or result that differs, with its value in each study that has the
        part.
        """
        parts, found = [{part for part, _ in s.facts} for s in self.studies], list[dict[str, str]]()
        for part, name in dict.fromkeys(key for s in self.studies for key in s.facts):
            # what a notebook was not given is its default
            missing = ["default" if part in own else "" for own in parts]
            values = [
                s.facts.get((part, name), other)
                for s, other in zip(self.studies, missing, strict=True)
            ]
            if len({*values} - {""}) > 1:
                row = dict(zip([s.name for s in self.studies], values, strict=True))
                found.append({"part": part, "choice": name, **row})
        return found

    def differences(self) -> Columns | Text:
        """What differs: a row a choice or result, a column a study."""
        rows = pd.DataFrame(self.differing)
        return Columns(rows) if len(rows) else Text("Nothing that two of them have differs.")

    def to_frame(self) -> DataFrame:
        """A row a run of any study, with a column for each of its numbers."""
        frames = [s.runs.to_frame().assign(study=s.name) for s in self.studies]
        return pd.concat(frames, ignore_index=True)

    def runs(self) -> Columns | Text:
        """The runs of all studies, a row each."""
        tables = {s.name: s.runs.table().to_frame() for s in self.studies if s.runs.runs}
        if not tables:
            return Text("No study has a run.")
        return Columns(pd.concat(tables, names=["Study"]).reset_index("Study"))

    def curves(self) -> dict[str, Curve]:
        """The loss curves of all studies, by study and run."""
        return {
            f"{s.name}: {run}": curve
            for s in self.studies
            for run, curve in s.runs.curves().items()
        }

    def to_json(self) -> dict[str, Any]:
        """What comparison.json holds."""
        names = [s.name for s in self.studies]
        rows = [
            {"part": r["part"], "choice": r["choice"], "values": {n: r[n] for n in names}}
            for r in self.differing
        ]
        return {
            "studies": names,
            "lacks": {s.name: list(s.lacks) for s in self.studies},
            "differences": rows,
        }


def compare_studies(here: Study, names: str = "") -> StudyComparison:
    """The studies of these names, separated by commas; without names `here` and the study that
    changed last.

        compare_studies(Study.open("a"), "a,b").differences()

    Raises ValueError for a study that does not exist. What one lacks, or what is damaged in it, is
    reported instead.
    """
    chosen = list(dict.fromkeys(name for part in names.split(",") if (name := part.strip())))
    require(
        not names or len(chosen) > 1, "studies", names, "must be two or more, separated by commas"
    )
    known = {
        p.name: p.stat().st_mtime_ns
        for p in outputs_root().iterdir()
        if (p / "index.html").is_file()
    }
    others = sorted((name for name in known if name != here.name), key=known.__getitem__)
    parts = []
    for name in chosen or [here.name, *others[-1:]]:
        study = Study(name)
        if not study.folder.is_dir():
            require_known("studies", name, known)
        parts.append(_parts(study))
        here.read |= {f"{name}/{file}": key for file, key in study.read.items()}
    return StudyComparison(studies=tuple(parts))


def _predicted(p: Mapping[str, Any]) -> dict[str, str]:
    """A plan's prediction as a person reads it."""
    return {
        "seconds an iteration": with_bounds(p["sec_per_it"], p["sec_lo"], p["sec_hi"]),
        "memory (GiB)": f"{p['memory_bytes'] / 2**30:.3g}",
        "P(out of memory)": chance(p["oom_probability"]),
    }


def _parts(study: Study) -> StudyParts:
    files, lacks, runs = dict[str, dict[str, Any]](), list[str](), MeasuredRuns(runs=())
    for name, notebook in {
        "plans": "02_topology",
        "calendar": "07_calendar",
        "decision": "08_decision",
    }.items():
        try:
            values = study.load(f"{name}.json", notebook)
            # what the table reads of a plan is there
            for plan in values["plans"] if name == "plans" else ():
                assert plan["shape"] and plan["topology"] and _predicted(plan["prediction"])
            files[name] = values
        except ValueError as error:
            lacks.append(
                str(error)
                if (study.folder / f"{name}.json").exists()
                else f"{name}.json ({notebook})"
            )
        except (KeyError, TypeError, AttributeError, ZeroDivisionError):
            lacks.append(f"study file={name}.json: is damaged")
    try:
        runs = measure_runs(study)
    except ValueError as error:
        lacks.append(str(error) if study.run_folders() else "runs (03_launch)")
    plans = files.get("plans", {}).get("plans", [])
    found = {
        f"parameters of {path.stem}": _parameters(path)
        for path in sorted(study.folder.glob("[0-9]*.ipynb"))
    }
    training = ("engine", "data", "optimizer", "dropout", "run")
    found["training"] = next(
        ({n: m.plan.to_json()[n] for n in training} for m in runs.runs if m.plan), {}
    )
    for plan in plans[:1]:
        found |= {
            "model": plan["shape"],
            "best plan": plan["topology"],
            "prediction": _predicted(plan["prediction"]),
        }
    dated = (
        "plan",
        "tokens",
        "days",
        "gpu_hours",
        "finish",
        "p_miss_deadline",
        "p_overrun_allocation",
    )
    found["forecast"] = {
        name: value for name, value in files.get("calendar", {}).items() if name in dated
    }
    found["decision"] = files.get("decision", {}).get("recommendation", {})
    facts = {
        (part, name): text for part, values in found.items() for name, text in _flat(values).items()
    }
    return StudyParts(name=study.name, facts=facts, runs=runs, lacks=tuple(lacks))


def _flat(values: Any) -> dict[str, str]:
    """Nested values by their path, as text: {"ramp": {"start": 8}} -> {"ramp.start": "8"}."""
    flat = (
        pd.json_normalize(values).to_dict("records")[0]
        if isinstance(values, dict) and values
        else {}
    )
    # where numbers come from, and where data lies, is no choice
    kept = {n: v for n, v in flat.items() if not {"sources", "folder"} & {*n.split(".")}}
    texts = {name: f"{v:.6g}" if isinstance(v, float) else str(v) for name, v in kept.items()}
    return {
        name: "/".join(t.split("/")[-2:]) if t.startswith("/") else t for name, t in texts.items()
    }


def _parameters(path: Path) -> dict[str, Any]:
    """The parameters with which papermill executed a notebook, without the study; {} where they are
    not recorded.
    """
    try:
        made = read_object(path, "notebook", metadata=dict)["metadata"]["papermill"]["parameters"]
        return {name: value for name, value in dict(made).items() if name != "study"}
    except (ValueError, KeyError, TypeError):
        return {}
