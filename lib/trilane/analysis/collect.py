"""MeasuredRuns: the measured runs of a study, or of any files of logs, and the tables and sentences about them."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.analysis.compare import compare, sides
from trilane.analysis.continuity import Continuity, find_breaks, joined
from trilane.analysis.fleet import column, first_of, numbered, ordered, row_of
from trilane.analysis.loss_curve import LEAST, Curve, join, trainings
from trilane.analysis.measure import Measurement, measure
from trilane.analysis.parallel import files, measure_path
from trilane.analysis.record import extent
from trilane.analysis.spikes import find_spikes
from trilane.analysis.steady_state import WARM_UP
from trilane.analysis.tables import frame
from trilane.config.cluster import Cluster
from trilane.logs.dialects.tables import use
from trilane.utils.numbers import percent
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Table, Text, grouped, middle, short, show
from trilane.utils.validation import require
from trilane.workspace.study import Study

SHOWN, DRAWN = 40, 8  # runs of hundreds that a table and a figure have
NUMERICS = {"skipped iterations": "skipped", "NaN": "nan_iterations", "gradient norm, median": "grad_norm"}
NUMERICS |= {"largest": "grad_norm_max", "loss scale, last": "loss_scale", "reductions": "loss_scale_drops"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRuns(Table):
    """The runs, each with its own name, also those without an iteration; and why other files were not read.

    `runs` are in the order in which they ran, as far as their paths show it; tables and figures have the order of the
    column `sort` of `logs table`, `ranked`, where that is given.
    """

    runs: tuple[Measurement, ...]
    unread: tuple[str, ...] = ()
    sort: str = ""
    ranked: tuple[Measurement, ...] = ()

    @property
    def drawn(self) -> list[Measurement]:
        """The first of the timed runs, as many as a figure can show."""
        return [m for m in self.ranked or self.runs if m.iterations][:DRAWN]

    @property
    def listed(self) -> list[Measurement]:
        """The first of the timed runs, as many as a table can show."""
        return [m for m in self.ranked or self.runs if m.iterations][:SHOWN]

    @property
    def timed(self) -> list[Measurement]:
        """The runs that printed iterations with their time."""
        return [m for m in self.runs if m.iterations]

    def summary(self) -> Text:
        """How many runs there are and how they ended, what of them is shown, and which files are not among them."""
        counts = Counter(str(m.status) for m in self.runs).most_common()
        ends = ", ".join(f"{number} {status}" for status, number in counts)
        text = Text.of("**{}** runs, {} of them with timed iterations: {}.", len(self.runs), len(self.timed), ends)
        if len(self.runs) > SHOWN or len(self.timed) > DRAWN:
            how = f"by {self.sort}" if self.sort else "by path"
            all_of = "runs.html, a table to sort, and runs.csv have all"
            text = Text.of("{} Tables show the first {} {}, figures {}; {}.", text, SHOWN, how, DRAWN, all_of)
        unread = [short(reason.partition(";")[0], 120) for reason in self.unread]
        return Text.of("{}{}", text, Text.joined("\n- not read: ", ["\n", *first_of(unread)]) if unread else "")

    def to_frame(self) -> DataFrame:
        """The runs in the columns of the BigScience tables, a row each."""
        return frame(self.runs)

    def __repr__(self) -> str:
        return f"{len(self.runs)} runs"

    def _repr_html_(self) -> str:
        return show(frame((self.ranked or self.runs)[:SHOWN]), self.digits)

    def endings(self) -> Table:
        """How each run ended, failed ones first: the line that proves it, nodes at fault, who did not come."""
        runs = sorted(self.ranked or self.runs, key=lambda m: not m.status.has_failed)[:SHOWN]
        more = {
            "node": [", ".join((*m.log.hosts, *(f"GPU {gpu}" for gpu in m.log.gpus))) for m in runs],
            "exclude": [m.log.exclude for m in runs],
            "did not come": [short("; ".join(m.log.collectives), 200) for m in runs],
        }
        return Columns(
            {
                "run": [m.name for m in runs],
                "file": [middle(m.log.source.name, 22) for m in runs],
                "dialect": [m.log.dialect for m in runs],
                "status": [str(m.status) for m in runs],
                "iterations": [
                    f"{n}{extent(n, m.log.first_iteration, m.log.last_iteration)}"
                    for m in runs
                    for n in [len(m.log.iterations)]
                ],
                **{name: column for name, column in more.items() if any(column)},
                "evidence": [short(m.log.evidence, 110) for m in runs],
            }
        )

    def problems(self) -> Table | Text:
        """The numbers that cannot be right, each with its runs and the line of the first of them."""
        found = grouped(((m, p) for m in self.runs for p in m.log.problems), lambda one: replace(one[1], line=None))
        if not found:
            return Text("No number of these logs contradicts another one, or the bounds of what is possible.")
        rows = list(found.items())[:SHOWN]
        columns: dict[str, list[Any]] = {
            "run": [", ".join(first_of([m.name for m, _ in same])) for _, same in rows],
            "line": ["" if same[0][1].line is None else same[0][1].line for _, same in rows],
            "column": [problem.column for problem, _ in rows],
            "what is wrong": [problem.message for problem, _ in rows],
            "evidence": [short(problem.evidence, 110) for problem, _ in rows],
        }
        return Columns({name: column for name, column in columns.items() if any(column)})

    def continuity(self) -> Continuity:
        """What the restarts of the trainings did not continue: inside a run, and from log to log of one training."""
        return joined(map(find_breaks, trainings([m.log for m in self.timed])))

    def numerics(self) -> Table:
        """Skipped and NaN iterations, gradient norms and loss scales."""
        runs = self.listed
        values = {name: [getattr(m.numerics, field) for m in runs] for name, field in NUMERICS.items()}
        return Columns({"run": [m.name for m in runs], **values})

    def efficiency(self) -> Table:
        """Which iterations do not count and why, and where time is lost."""
        runs = self.listed
        return Columns(
            {
                "run": [m.name for m in runs],
                "left out of the medians": [m.window.sentence.removeprefix("left out: ") for m in runs],
                "tokens/s": [round(m.tokens_per_s) if m.tokens_per_s > 0 else "" for m in runs],
                "lost": [percent(m.lost_share) for m in runs],
                "bubble": [percent(m.bubble) for m in runs],
                "waits": [percent(m.waited) for m in runs],
                "MFU": [percent(m.utilization.get("mfu", math.nan)) for m in runs],
                "HFU": [percent(m.utilization.get("hfu", math.nan)) for m in runs],
            }
        )

    def curves(self) -> dict[str, Curve]:
        """The loss curve of each training, by the label of its first run."""
        of = {id(m.log): m for m in self.timed}
        groups = trainings([m.log for m in self.timed if "lm_loss" in m.log.iterations])
        return {of[id(g[0])].name: join(g, of[id(g[0])].config.seq_length) for g in groups}

    def drawn_curves(self) -> dict[str, Curve]:
        """The first of the curves, as many as a figure can show."""
        curves, order = self.curves(), {m.name: place for place, m in enumerate(self.ranked or self.runs)}
        return {name: curves[name] for name in sorted(curves, key=order.__getitem__)[:DRAWN]}

    def loss_summary(self) -> Text:
        """First and last loss of each training, and how far plans of one training differ."""
        import pandas as pd

        losses = {name: c.table.set_index("iteration")["lm_loss"] for name, c in self.curves().items()}
        losses = {name: loss.dropna() for name, loss in losses.items() if loss.notna().any()}
        if not losses:
            return Text("No loss was printed.")
        ends = "; ".join(first_of([f"{name} from {x.iloc[0]:.2f} to {x.iloc[-1]:.2f}" for name, x in losses.items()]))
        text = Text.of("The loss goes {} (nats per token).", ends)
        plans = {
            (p.shape, p.topology.gbs, p.data, p.optimizer, p.run.seed) if (p := m.plan) else id(m) for m in self.timed
        }
        if len(losses) > 1 and len(plans) == 1:
            table = pd.DataFrame(losses)
            most = (table.max(axis=1) - table.min(axis=1)).max()
            return Text.of("{} They differ by at most **{:.1e}** in any iteration.", text, most)
        return text

    def spikes(self) -> Text:
        """Spikes, restart jumps and divergences of all trainings."""
        found, short_ones = list[str](), list[str]()
        for name, curve in self.curves().items():
            events, losses = find_spikes(curve), curve.table["lm_loss"].dropna()
            found += [f"{name}: {event.sentence}" for event in events]
            if not events and len(losses) and losses.iloc[-1] > losses.iloc[0]:
                found.append(
                    f"{name}: the loss rose, from {losses.iloc[0]:.4g} at first to {losses.iloc[-1]:.4g} at last"
                )
            short_ones += [name] if len(losses) < 2 * LEAST else []
        end = Text.of("The first {} lines of a training are not checked for spikes.", LEAST)
        if short_ones:
            end = Text.of("{} Too short to be checked for a divergence: {}.", end, ", ".join(first_of(short_ones)))
        if not found:
            return Text.of("No spike, no restart jump{}. {}", "" if short_ones else ", no divergence", end)
        return Text.of("{}\n\n{}", Text.joined("\n- ", ["", *first_of(found)]), end)

    def tensorboard(self) -> Text:
        """How to look at the runs in TensorBoard, where any of them wrote its event files."""
        written = [m.name for m in self.runs if any(m.log.source.parent.glob("tensorboard/events.out.tfevents.*"))]
        if not written:
            return Text("No run wrote files for TensorBoard; `run.tensorboard` in a plan makes it do so.")
        return Text.of(
            "{} of {} runs wrote files for TensorBoard ({}). In the folder that holds the runs, `runs` of the study: "
            "`tensorboard --logdir .`, then open <http://localhost:6006>. It is installed with trilane's training; "
            "elsewhere `pip install tensorboard`. From a login node, `ssh -L 6006:localhost:6006` to it first.",
            *(len(written), len(self.runs), ", ".join(first_of(written))),
        )

    def compare(self, a: str = "", b: str = "") -> Text:
        """Whether the runs with `b` in their names are faster than those with `a`; without both, the two fastest."""
        one, other = sides(self.timed, a, b)
        if not one:
            return Text("There are no two topologies of one model and batch to compare; name `a` and `b`.")
        found = compare(one, other)
        names = [", ".join(first_of([m.name for m in side])) for side in (one, other)]
        return Text.of(
            "A is {}, B is {}. **{}.** Spread between runs {:.1%}: {}. {}",
            *(*names, found.sentence, found.deviation, found.source, "; ".join(found.notes)),
        )


def measure_runs(
    study: Study,
    logs: str = "",
    warm_up: int = WARM_UP,
    cluster: Cluster | None = None,
    sort: str = "",
    dialect: str = "",
) -> MeasuredRuns:
    """The runs of `logs` (a file, a folder, a glob; run on `cluster` where given), or of the study where that is empty.

    In the order of a column of `logs table`, `sort`, or of their paths; `dialect` is a file of a user's own
    table. Raises ValueError where there is no run. A run folder is one run; in another folder every file counts whose
    name does not show that it is no log.
    """
    by = column(sort, "sort") if sort else ""
    use([Path(dialect)] if dialect else [])
    if not logs:
        folders = study.run_folders()
        require(bool(folders), "study", study.name, "has no run; run 03_launch first, or name logs")
        runs, unread = [measure(folder, warm_up) for folder in progress(folders, "runs", "run")], list[str]()
    else:
        runs, unread = _of_logs(logs, warm_up, cluster)
    ranked = [row["run"] for row in ordered([{**row_of(m, m.name), "run": m} for m in runs], by)] if by else []
    return MeasuredRuns(runs=tuple(runs), unread=tuple(unread), sort=by, ranked=tuple(ranked))


def _of_logs(logs: str, warm_up: int, cluster: Cluster | None) -> tuple[list[Measurement], list[str]]:
    gpu = cluster.gpu if cluster and cluster.gpu.kind == "cuda" else None
    runs, unread = list[Measurement](), list[str]()
    for path in progress(files(logs), "logs", "log"):
        try:
            runs += measure_path(path, warm_up, gpu)
        except (ValueError, OSError) as error:
            unread.append(str(error))
    require(bool(runs), "logs", logs, f"no log among them: {unread[0] if unread else 'no such file'}")
    return numbered(runs), unread
