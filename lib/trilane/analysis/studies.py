"""Studies side by side: what was chosen, predicted and measured in each, and their losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from trilane.analysis.collect import MeasuredRuns, measure_runs
from trilane.analysis.loss_curve import Curve
from trilane.utils.numbers import amount
from trilane.utils.tables import DataFrame, Table, Text
from trilane.utils.validation import read_object, require, require_known
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import Study

PREDICTED = ("sec_per_it", "sec_lo", "sec_hi", "memory_bytes", "oom_probability")
DATED = ("plan", "tokens", "days", "gpu_hours", "finish", "p_miss_deadline", "p_overrun_allocation")
MEASURED = ("sec_per_it", "tflops", "tokens_per_s", "memory_gib", "loss", "status")
FILES = {
    "plans.json": "02_topology",
    "calendar.json": "07_calendar",
    "decision.json": "08_decision",
}
NO_CHOICE = {"sources", "folder"}  # where numbers come from, and where data lies


@dataclass(frozen=True, kw_only=True)
class StudyComparison(Table):
    """What differs between studies: a row a choice or result, a column a study.

    `facts` has each study's choices and results, by part and name, as text; `lacks` what is missing
    or damaged in it; `runs` its measured runs.
    """

    facts: Mapping[str, Mapping[tuple[str, str], str]]
    lacks: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, MeasuredRuns]

    def summary(self) -> Text:
        """How many choices and results differ, and what each study lacks."""
        names = Text.joined(", ", [Text.of("{:code}", name) for name in self.facts])
        words = "**{} choices and results** differ between {}."
        lines = [Text.of(words, len(self.to_frame()), names)]
        for name, lacks in self.lacks.items():
            if lacks:
                lines.append(Text.of("{} lacks {}.", name, "; ".join(lacks)))
        return Text.joined("\n\n", lines)

    def to_frame(self) -> DataFrame:
        """A row for each choice or result that differs: part, choice, its value in each study."""
        parts = {name: {part for part, _ in facts} for name, facts in self.facts.items()}
        rows = []
        for part, choice in dict.fromkeys(key for facts in self.facts.values() for key in facts):
            row = {"part": part, "choice": choice}
            for name, facts in self.facts.items():
                unset = "default" if part in parts[name] else ""  # what was not given
                row[name] = facts.get((part, choice), unset)
            if len({row[name] for name in self.facts} - {""}) > 1:
                rows.append(row)
        return pd.DataFrame(rows, columns=["part", "choice", *self.facts])

    def curves(self) -> dict[str, Curve]:
        """The loss curves of all studies, by study and run."""
        curves: dict[str, Curve] = {}
        for name, runs in self.runs.items():
            curves |= {f"{name}: {run}": curve for run, curve in runs.curves().items()}
        return curves

    def to_json(self) -> dict[str, Any]:
        """What comparison.json holds."""
        lacks = {name: list(lines) for name, lines in self.lacks.items()}
        differences = self.to_frame().to_dict("records")
        return {"studies": list(self.facts), "lacks": lacks, "differences": differences}


def compare_studies(here: Study, names: str = "") -> StudyComparison:
    """The studies of these names, separated by commas; without names `here` and the study that
    changed last.

        compare_studies(Study.open("a"), "a,b").to_frame()

    Raises ValueError for a study that does not exist. What one lacks, or what is damaged in it, is
    reported instead.
    """
    indexes = sorted(outputs_root().glob("*/index.html"), key=lambda path: path.stat().st_mtime_ns)
    known = [path.parent.name for path in indexes]
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not names:
        chosen = [here.name, *[name for name in known if name != here.name][-1:]]
    else:
        rule = "must be two or more, separated by commas"
        require(len(chosen) > 1, "studies", names, rule)
    facts = {}
    lacks = {}
    runs = {}
    for name in chosen:
        study = Study(name)
        if not study.folder.is_dir():
            require_known("studies", name, known)
        missing: list[str] = []
        try:
            runs[name] = measure_runs(study)
        except ValueError as error:
            missing.append(str(error))
            runs[name] = MeasuredRuns(runs=())
        facts[name] = _facts(study, runs[name], missing)
        lacks[name] = tuple(missing)
        here.read |= {f"{name}/{file}": key for file, key in study.read.items()}
    return StudyComparison(facts=facts, lacks=lacks, runs=runs)


def _facts(study: Study, runs: MeasuredRuns, missing: list[str]) -> dict[tuple[str, str], str]:
    """Choices and results of a study by part and name."""
    parts: dict[str, dict[str, Any]] = {}
    for path in sorted(study.folder.glob("[0-9]*.ipynb")):
        try:
            metadata = read_object(path, "notebook", metadata=dict)["metadata"]
            parameters = dict(metadata["papermill"]["parameters"])
        except (ValueError, KeyError, TypeError):
            continue  # they are not recorded
        parameters.pop("study", None)
        parts[f"parameters of {path.stem}"] = parameters
    for file, notebook in FILES.items():
        try:
            values = study.load(file, notebook)
            if file == "plans.json":
                best = values["plans"][0]
                parts["model"] = dict(best["shape"])
                parts["best plan"] = dict(best["topology"])
                parts["prediction"] = {name: best["prediction"][name] for name in PREDICTED}
            elif file == "calendar.json":
                parts["forecast"] = {name: values.get(name) for name in DATED}
            else:
                parts["decision"] = dict(values["recommendation"])
        except ValueError as error:
            missing.append(str(error))
        except (KeyError, TypeError, IndexError):
            missing.append(f"study file={file}: is damaged")
    for row in runs.to_frame().to_dict("records"):
        parts[f"run {row['run']}"] = {name: row[name] for name in MEASURED}
    facts: dict[tuple[str, str], str] = {}
    for part, choices in parts.items():
        facts |= {(part, name): text for name, text in _flat(choices).items()}
    return facts


def _flat(values: dict[str, Any]) -> dict[str, str]:
    """Nested values by their path, as text: {"ramp": {"start": 8}} -> {"ramp.start": "8"}."""
    texts: dict[str, str] = {}
    if not values:
        return texts
    for name, value in pd.json_normalize(values).iloc[0].items():
        if not NO_CHOICE & set(str(name).split(".")):
            texts[str(name)] = amount(value) if isinstance(value, float) else str(value)
    return texts
