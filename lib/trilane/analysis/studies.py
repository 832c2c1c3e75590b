"""Studies side by side: what was chosen, predicted and measured in each, and their losses."""

from collections.abc import Mapping

import pandas as pd

from trilane.analysis.collect import MeasuredRuns
from trilane.analysis.loss_curve import Curve
from trilane.analysis.measure import measure
from trilane.utils.frozen import frozen
from trilane.utils.numbers import amount
from trilane.utils.tables import DataFrame, Json, Table, Text
from trilane.utils.validation import require, require_known
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import Study

PREDICTED = ("sec_per_it", "sec_lo", "sec_hi", "memory_bytes", "oom_probability")
DATED = (
    "plan",
    "tokens",
    "days_p50",
    "gpu_hours_p50",
    "finish",
    "p_miss_deadline",
    "p_overrun_allocation",
)
MEASURED = ("sec_per_it", "tflops", "tokens_per_s", "memory_gib", "loss", "status")


@frozen
class StudyComparison(Table):
    """What differs between studies: a row a choice or result, a column a study.

    `facts` has each study's choices and results, by name, as text; `runs` its measured
    runs.
    """

    facts: Mapping[str, Mapping[str, str]]
    runs: Mapping[str, MeasuredRuns]

    def summary(self) -> Text:
        """How many choices and results differ."""
        return Text.of("**{} choices and results** differ.", len(self.to_frame()))

    def to_frame(self) -> DataFrame:
        """A row for each choice or result that differs: its name, and its value in each study, ""
        where it has none.
        """
        table = pd.DataFrame(self.facts)
        table = table[table.nunique(axis=1) > 1].fillna("")
        return table.rename_axis("choice").reset_index()

    def curves(self) -> dict[str, Curve]:
        """The loss curves of all studies, by study and run."""
        curves: dict[str, Curve] = {}
        for name, runs in self.runs.items():
            curves |= {f"{name}: {run}": curve for run, curve in runs.curves().items()}
        return curves

    def to_json(self) -> Json:
        """What comparison.json holds."""
        differences = self.to_frame().to_dict("records")
        return {"studies": list(self.facts), "differences": differences}


def compare_studies(here: Study, names: str = "") -> StudyComparison:
    """The studies of these names, separated by commas; without names `here` and the study that
    changed last.

        compare_studies(Study.open("a"), "a,b").to_frame()

    Raises ValueError for a study that does not exist, and where a result file of one is damaged.
    """
    indexes = sorted(outputs_root().glob("*/index.html"), key=lambda path: path.stat().st_mtime_ns)
    known = [path.parent.name for path in indexes]
    if names:
        chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
        require(len(chosen) > 1, "studies", names, "must be two or more, separated by commas")
    else:
        chosen = [here.name, *[name for name in known if name != here.name][-1:]]
    facts = {}
    runs = {}
    for name in chosen:
        study = Study(name)
        if not study.folder.is_dir():
            require_known("studies", name, known)
        runs[name] = MeasuredRuns(runs=tuple(map(measure, study.run_folders())))
        try:
            facts[name] = _facts(study, runs[name])
        except (LookupError, TypeError, AttributeError, NotImplementedError):
            raise ValueError(f"study={name}: a result file of it is damaged") from None
        here.read |= {f"{name}/{file}": key for file, key in study.read.items()}
    return StudyComparison(facts=facts, runs=runs)


def _facts(study: Study, runs: MeasuredRuns) -> dict[str, str]:
    """Choices and results of a study by name, of the files that it has."""
    parts = {}
    if (study.folder / "plans.json").is_file():
        best = study.load("plans.json", "02_topology")["plans"][0]
        parts["model"] = best["shape"]
        parts["best plan"] = best["topology"]
        parts["prediction"] = {name: best["prediction"][name] for name in PREDICTED}
    if (study.folder / "calendar.json").is_file():
        calendar = study.load("calendar.json", "07_calendar")
        parts["forecast"] = {name: calendar.get(name) for name in DATED}
    if (study.folder / "decision.json").is_file():
        parts["decision"] = study.load("decision.json", "08_decision")["recommendation"]
    for run in runs.runs:
        row = run.row()
        parts[f"run {run.name}"] = {name: row[name] for name in MEASURED}
    facts = {}
    for record in pd.json_normalize(parts, sep=": ").to_dict("records"):
        for name, value in record.items():
            facts[str(name)] = amount(value) if isinstance(value, float) else str(value)
    return facts
