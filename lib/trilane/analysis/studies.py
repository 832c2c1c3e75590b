"""StudyComparison: two or more studies side by side: where they differ, their plans, runs, speed and cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trilane.analysis.compare import compare
from trilane.analysis.loss_curve import Curve
from trilane.analysis.measure import Measurement
from trilane.analysis.study_parts import NUMBERS, StudyParts, forecast_cells, plan_point, study_parts
from trilane.utils.tables import Columns, Html, Text, show
from trilane.utils.validation import require
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import Study

LEAST = 2
EQUAL = 1.001  # a ratio of times nearer to 1 is the same time
SHARED = 4  # plans that ran in both studies and are tested one by one
LACKS = "lacks it"
NUMBERS_WORD = "numbers of the cluster and of the planner differ"


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """Studies side by side, in the order in which they were named."""

    studies: tuple[StudyParts, ...]

    def summary(self) -> Text:
        """What is compared, and what a study lacks, a line each."""
        names = Text.joined(", ", [Text.of("{:code}", s.name) for s in self.studies])
        lines = [Text.of("{} lacks {}.", s.name, "; ".join(s.lacks)) for s in self.studies if s.lacks]
        if len(self.studies) < LEAST:
            lines.append(Text("It is the only study here; name two or more: `-p studies a,b`."))
        return Text.joined("\n\n", [Text.of("Compared: {}.", names), *lines])

    def rows(self) -> Iterator[tuple[str, str, list[str]]]:
        """Part, name and each study's value; only parts that two studies have."""
        facts = [s.facts() for s in self.studies]
        for part in dict.fromkeys(part for found in facts for part in found):
            having = [found[part] for found in facts if part in found]
            absent = "default" if part.startswith("parameters") else ""
            for name in dict.fromkeys(name for found in having for name in found) if len(having) >= LEAST else ():
                yield part, name, [f[part].get(name, absent) if part in f else LACKS for f in facts]

    def differences(self) -> Columns | Text:
        """What differs of what somebody chose: a row a choice, a column a study."""
        rows = [(p, name, *values) for p, name, values in self.rows() if p not in NUMBERS and _differ(values)]
        if not rows:
            return Text("They differ in no parameter, model, cluster, plan or training that two of them have.")
        return Columns.of_rows(("part", "choice", *(s.name for s in self.studies)), rows)

    def folded(self) -> Html:
        """Numbers of the cluster and of the planner that differ, and what is equal: both folded."""
        numbers = [(p, name, *values) for p, name, values in self.rows() if p in NUMBERS and _differ(values)]
        equal = [(p, name, next(v for v in vs if v != LACKS)) for p, name, vs in self.rows() if not _differ(vs)]
        heads = ("part", "name", *(s.name for s in self.studies)), ("part", "choice", "of all")
        pieces = []
        for rows, names, word in ((numbers, heads[0], NUMBERS_WORD), (equal, heads[1], "choices are equal")):
            table = show(Columns.of_rows(names, rows).columns) if rows else Html("")
            pieces.append(Html.of("<details><summary>{} {}</summary>{}</details>", len(rows), word, table))
        return Html.joined("\n", pieces)

    def plans(self) -> Columns:
        """The best plan of each study with its prediction, and how many plans its search kept."""
        bests = [(s.name, len(s.plans), plan_point(s.plans[0]) if s.plans else {}) for s in self.studies]
        names = {"best": "plan", "id": "id", "GPUs": "gpus", "seconds an iteration": "seconds"}
        names |= {"90 % interval": "interval", "tokens/s": "tokens_per_s", "GiB": "gib", "P(OOM)": "oom"}
        columns = {head: [point.get(name, "") for _, _, point in bests] for head, name in names.items()}
        return Columns({"study": [name for name, _, _ in bests], "plans": [n for _, n, _ in bests], **columns})

    def shared_plans(self) -> Text:
        """Of each two studies: how many plans both have, and how far their predictions differ."""
        lines = []
        for a, b in combinations(self.studies, 2):
            one, other = ({p["id"]: p["prediction"]["sec_per_it"] for p in s.plans} for s in (a, b))
            ratios = [other[key] / one[key] for key in one if key in other]
            if not ratios:
                lines.append(Text.of("{} and {} have no plan in common.", a.name, b.name))
                continue
            low, high = min(ratios), max(ratios)
            same = "the same times" if max(high, 1 / low) < EQUAL else f"{low:.3f} to {high:.3f} of the other's times"
            lines.append(
                Text.of("{} plans are in {} and in {}, which predicts {} for them.", len(ratios), a.name, b.name, same)
            )
        return Text.joined("\n\n", lines)

    def runs(self) -> Columns | Text:
        """The runs of all studies, a row each."""
        tables = [(s.name, s.runs.to_frame()) for s in self.studies if s.runs]
        columns: dict[str, list[Any]] = {"Study": [name for name, table in tables for _ in range(len(table))]}
        for column in dict.fromkeys(c for _, table in tables for c in table):
            columns[column] = [v for _, t in tables for v in (t[column] if column in t else [""] * len(t))]
        return Columns(columns) if tables else Text("No study has a run.")

    def faster(self) -> Text:
        """Whether the fastest topology of a study is faster than that of another; then plans that ran in both."""
        lines = []
        for a, b in combinations(self.studies, 2):
            without = [s.name for s in (a, b) if not s.timed]
            if without:
                lines.append(Text.of("{} against {}: no timed run in {}.", b.name, a.name, " and ".join(without)))
                continue
            lines.append(_tested("the fastest topology", a, b, *(_fastest(s) for s in (a, b))))
            shared = {m.plan.id: m.plan.label for m in a.timed if m.plan and b.of_plan(m.plan.id)}
            for key, label in list(shared.items())[:SHARED]:
                lines.append(_tested(label, a, b, a.of_plan(key), b.of_plan(key)))
            if len(shared) > SHARED:
                lines.append(Text.of("{} more plans ran in both.", len(shared) - SHARED))
        return Text.joined("\n\n", lines)

    def curves(self) -> dict[str, dict[str, Curve]]:
        """The loss curves of each study that has any, by study and run."""
        found = {s.name: s.runs.curves() for s in self.studies if s.runs}
        return {name: curves for name, curves in found.items() if curves}

    def losses(self) -> Text:
        """First and last losses, a line a study."""
        lines = [Text.of("{}: {}", s.name, s.runs.loss_summary()) for s in self.studies if s.runs]
        return Text.joined("\n\n", lines or [Text("No study has a run.")])

    def costs(self) -> Columns | Text:
        """What 07_calendar and 08_decision found: what is recommended, days, GPU-hours, the date and the risks."""
        found = [(s, s.files["calendar.json"]) for s in self.studies if "calendar.json" in s.files]
        rows = [{"study": s.name, "recommended": s.recommended, **forecast_cells(values)} for s, values in found]
        none = Text("No study has a forecast; `07_calendar` makes one.")
        return Columns({name: [row[name] for row in rows] for name in rows[0]}) if rows else none

    def to_json(self) -> dict[str, Any]:
        """What comparison.json holds."""
        names = [s.name for s in self.studies]
        rows = [
            {"part": part, "choice": name, "values": dict(zip(names, values, strict=True))}
            for part, name, values in self.rows()
            if _differ(values)
        ]
        return {"studies": names, "lacks": {s.name: list(s.lacks) for s in self.studies}, "differences": rows}


def compare_studies(here: Study, names: str = "") -> StudyComparison:
    """The studies of these names, separated by commas; without names `here` and the study that changed last.

    Raises ValueError for a study that does not exist. What one lacks, or what is damaged in it, is reported instead.
    """
    chosen = list(dict.fromkeys(name for part in names.split(",") if (name := part.strip())))
    require(not names or len(chosen) >= LEAST, "studies", names, "must be two or more, separated by commas")
    known = {p.name: p.stat().st_mtime_ns for p in outputs_root().iterdir() if (p / "index.html").is_file()}
    others = sorted((name for name in known if name != here.name), key=known.__getitem__)
    parts = []
    for name in chosen or [here.name, *others[-1:]]:
        study = Study(name)
        require(study.folder.is_dir(), "studies", name, f"no study of that name; there are {', '.join(sorted(known))}")
        parts.append(study_parts(study))
        here.read |= {f"{name}/{file}": key for file, key in study.read.items()}
    return StudyComparison(studies=tuple(parts))


def _fastest(study: StudyParts) -> list[Measurement]:
    """The runs of the study's fastest topology."""
    best = study.timed[0]
    return study.of_plan(best.plan.id) if best.plan else [best]


def _tested(what: str, a: StudyParts, b: StudyParts, one: list[Measurement], other: list[Measurement]) -> Text:
    """The test of 'faster' in a line, B the second study."""
    found = compare(one, other)
    template = "{}: A is {} of {}, B is {} of {}. **{}.** Spread between runs {:.1%}: {}. {}"
    names = [", ".join(m.name for m in runs) for runs in (one, other)]
    values = (what, names[0], a.name, names[1], b.name, found.sentence, found.deviation, found.source)
    return Text.of(template, *values, "; ".join(found.notes))


def _differ(values: list[str]) -> bool:
    return len({v for v in values if v != LACKS}) > 1
