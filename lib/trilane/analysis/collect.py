"""MeasuredRuns: the measured runs of a study, or of any files of logs, and the tables and sentences about them."""

import math
from dataclasses import dataclass, replace

from trilane.analysis.compare import compare, sides
from trilane.analysis.levels import LEAST
from trilane.analysis.loss_curve import Curve, join, trainings
from trilane.analysis.measure import Measurement, measure
from trilane.analysis.parallel import files, measure_path
from trilane.analysis.spikes import find_spikes
from trilane.analysis.steady_state import WARM_UP
from trilane.analysis.tables import frame
from trilane.config.cluster import Cluster
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Table, Text, middle, percent, short
from trilane.utils.validation import require
from trilane.workspace.study import Study

NUMERICS = {"skipped iterations": "skipped", "NaN": "nan_iterations", "gradient norm, median": "grad_norm"}
NUMERICS |= {"largest": "grad_norm_max", "loss scale, last": "loss_scale", "reductions": "loss_scale_drops"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRuns(Table):
    """The runs, each with its own name, also those without an iteration; and why other files were not read."""

    runs: tuple[Measurement, ...]
    unread: tuple[str, ...] = ()

    @property
    def timed(self) -> list[Measurement]:
        """The runs that printed iterations with their time."""
        return [m for m in self.runs if m.iterations]

    def summary(self) -> Text:
        """How many runs there are, and which files are not among them."""
        unread = "; ".join(self.unread)
        return Text.of("{} runs, {} of them with timed iterations. {}", len(self.runs), len(self.timed), unread)

    def to_frame(self) -> DataFrame:
        """The runs in the columns of the BigScience tables, a row each."""
        return frame(self.runs)

    def endings(self) -> Table:
        """How each run ended, the line that proves it, the nodes at fault, and who did not come to a collective."""
        more = {
            "exclude": [m.log.exclude for m in self.runs],
            "did not come": [short("; ".join(m.log.collectives), 200) for m in self.runs],
        }
        return Columns(
            {
                "run": [m.name for m in self.runs],
                "file": [middle(m.log.source.name, 30) for m in self.runs],
                "dialect": [m.log.dialect for m in self.runs],
                "status": [str(m.status) for m in self.runs],
                "iterations": [len(m.log.iterations) for m in self.runs],
                "evidence": [short(m.log.evidence, 80) for m in self.runs],
                **{name: column for name, column in more.items() if any(column)},
            }
        )

    def numerics(self) -> Table:
        """Skipped and NaN iterations, gradient norms and loss scales."""
        values = {name: [getattr(m.numerics, field) for m in self.timed] for name, field in NUMERICS.items()}
        return Columns({"run": [m.name for m in self.timed], **values})

    def efficiency(self) -> Table:
        """Which iterations do not count and why, and where time is lost."""
        return Columns(
            {
                "run": [m.name for m in self.timed],
                "left out of the medians": [m.window.sentence.removeprefix("left out: ") for m in self.timed],
                "tokens/s": [round(m.tokens_per_s) if m.tokens_per_s > 0 else "" for m in self.timed],
                "lost": [percent(m.lost_share) for m in self.timed],
                "bubble": [percent(m.bubble) for m in self.timed],
                "waits": [percent(m.waited) for m in self.timed],
                "MFU": [percent(m.utilization.get("mfu", math.nan)) for m in self.timed],
                "HFU": [percent(m.utilization.get("hfu", math.nan)) for m in self.timed],
            }
        )

    def curves(self) -> dict[str, Curve]:
        """The loss curve of each training, by the label of its first run."""
        of = {id(m.log): m for m in self.timed}
        groups = trainings([m.log for m in self.timed if "lm_loss" in m.log.iterations])
        return {of[id(g[0])].name: join(g, of[id(g[0])].config.seq_length) for g in groups}

    def loss_summary(self) -> Text:
        """First and last loss of each training, and how far plans of one training differ."""
        import pandas as pd

        losses = {name: c.table.set_index("iteration")["lm_loss"] for name, c in self.curves().items()}
        losses = {name: loss.dropna() for name, loss in losses.items() if loss.notna().any()}
        if not losses:
            return Text("No loss was printed.")
        ends = "; ".join(f"{name} from {x.iloc[0]:.2f} to {x.iloc[-1]:.2f}" for name, x in losses.items())
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
            end = Text.of("{} Too short to be checked for a divergence: {}.", end, ", ".join(short_ones))
        if not found:
            return Text.of("No spike, no restart jump{}. {}", "" if short_ones else ", no divergence", end)
        return Text.of("{}\n\n{}", Text.joined("\n- ", ["", *found]), end)

    def tensorboard(self) -> Text:
        """How to look at the runs in TensorBoard, where any of them wrote its event files."""
        written = [m.name for m in self.runs if any(m.log.source.parent.glob("tensorboard/events.out.tfevents.*"))]
        if not written:
            return Text("No run wrote files for TensorBoard; `run.tensorboard` in a plan makes it do so.")
        return Text.of(
            "{} of {} runs wrote files for TensorBoard ({}). In the folder that holds the runs, `runs` of the study: "
            "`tensorboard --logdir .`, then open <http://localhost:6006>. It is installed with trilane's training; "
            "elsewhere `pip install tensorboard`. From a login node, `ssh -L 6006:localhost:6006` to it first.",
            *(len(written), len(self.runs), ", ".join(written)),
        )

    def compare(self, a: str = "", b: str = "") -> Text:
        """Whether the runs with `b` in their names are faster than those with `a`; without both, the two fastest."""
        one, other = sides(self.timed, a, b)
        if not one:
            return Text("There are no two topologies of one model and batch to compare; name `a` and `b`.")
        found = compare(one, other)
        names = [", ".join(m.name for m in side) for side in (one, other)]
        return Text.of(
            "A is {}, B is {}. **{}.** Spread between runs {:.1%}: {}. {}",
            *(*names, found.sentence, found.deviation, found.source, "; ".join(found.notes)),
        )


def measure_runs(study: Study, logs: str = "", warm_up: int = WARM_UP, cluster: Cluster | None = None) -> MeasuredRuns:
    """The runs of `logs` (a file, a folder, a glob; run on `cluster` where given), or of the study where that is empty.

    Raises ValueError where there is none. A run folder is one run; in another folder every file counts whose name does
    not show that it is no log.
    """
    if not logs:
        folders = study.run_folders()
        require(bool(folders), "study", study.name, "has no run; run 03_launch first, or name logs")
        return MeasuredRuns(runs=tuple(measure(folder, warm_up) for folder in progress(folders, "runs", "run")))
    gpu = cluster.gpu if cluster and cluster.gpu.kind == "cuda" else None
    runs, unread = list[Measurement](), list[str]()
    for path in progress(files(logs), "logs", "log"):
        try:
            runs += measure_path(path, warm_up, gpu)
        except (ValueError, OSError) as error:
            unread.append(str(error))
    require(bool(runs), "logs", logs, f"no log among them: {unread[0] if unread else 'no such file'}")
    return MeasuredRuns(runs=tuple(_numbered(runs)), unread=tuple(unread))


def _numbered(runs: list[Measurement]) -> list[Measurement]:
    """The runs, named by a number and what is known: file names are long, and a file may hold several runs."""
    named = []
    for number, m in enumerate(runs, 1):
        c = m.config
        known = f" tp{c.tp}-pp{c.pp}-dp{c.dp}" + f"-mbs{c.mbs}" * (c.mbs > 0) if c.gpus else f" {m.log.dialect}"
        named.append(m if m.plan else replace(m, name=f"{number}{known}"))
    return named
