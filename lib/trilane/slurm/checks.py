"""What is checked of a plan before a job costs anything: its nodes, limits, storage, time, and what
it is for.

A check returns rows: what is wrong (falsy: nothing), the rule, how severe that is, a message and
the remedy.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trilane.config.cluster import Cluster
from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import CLUSTER_RULES
from trilane.config.plan import Plan
from trilane.costmodel.predict import IMPOSSIBLE, Prediction, predict
from trilane.costmodel.trace import trace_of
from trilane.forecasting.failures import FailureModel, evaluation_s
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.slurm.script import directives, nodes_of
from trilane.slurm.sites import JobRequest, Site, seconds_of
from trilane.workspace.checkpoints import (
    FOLDER,
    checkpoint_bytes,
    checkpoint_files,
    found_in,
    latest,
)
from trilane.workspace.continuation import require_continuable
from trilane.workspace.prepared_corpora import BUILT_IN, tokens_about, unprepared
from trilane.workspace.run_folder import is_completed, is_started
from trilane.workspace.storage import available

REFUSAL, WARNING = "refusal", "warning"
Row = tuple[object, str, str, str, str]


@dataclass(frozen=True)
class JobCheck:
    """A job before its submission: the plan of a run folder with its script, edited by hand or not."""

    plan: Plan
    site: Site
    request: JobRequest
    folder: Path
    script: str

    @cached_property
    def cluster(self) -> Cluster:
        """The nodes that the job gets."""
        return nodes_of(self.plan, self.site)

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted time and memory on these nodes."""
        return predict(self.plan, self.cluster)

    @cached_property
    def directives(self) -> dict[str, str]:
        """The script's own #SBATCH options, which are decisive; ValueError where they cannot be
        read.
        """
        return directives(self.script)

    @property
    def limit_s(self) -> float:
        """The job's time limit; ten minutes where the script names none, as many sites have it."""
        return seconds_of(self.directives.get("time", "00:10:00"))

    @property
    def risks(self) -> FailureModel:
        """The forecast's, with the storage that was measured on the nodes of the job, or of the
        plan.
        """
        return FailureModel().measured(self.cluster).measured(self.plan.cluster)

    @property
    def save_s(self) -> float:
        """Seconds of a save, by the forecast's bandwidth."""
        return self.risks.save_s(checkpoint_bytes(self.plan.shape), self.nodes)

    @property
    def evaluation_s(self) -> float:
        """Seconds of an evaluation, as forward passes."""
        return evaluation_s(
            self.plan.topology, self.plan.run.eval_iters, self.prediction.sec_per_it
        )

    @property
    def needed_s(self) -> float:
        """Seconds of all iterations with their evaluations; left out: that larger batches of a
        ramp-up are slower.
        """
        run, count = self.plan.run, self.plan.run.goal - self.plan.run.start_iteration
        evaluations = count // run.eval_interval if run.eval_interval else 0
        return count * self.prediction.sec_per_it + evaluations * self.evaluation_s

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return -(-self.plan.topology.gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node of the job."""
        return min(self.plan.topology.gpus, self.cluster.gpus_per_node)

    @property
    def spares(self) -> int:
        """Nodes that the script asks for beyond those, and can use: a dead one must not end the
        job.
        """
        asked = self.directives.get("nodes", "")
        return (
            max(0, int(asked) - self.nodes)
            if "no-kill" in self.directives and asked.isdecimal()
            else 0
        )


def nodes(case: JobCheck) -> list[Row]:
    """The plan's GPUs are the site's, and the topology obeys these nodes."""
    t, here, planned, gpu = case.plan.topology, case.cluster, case.plan.cluster, case.cluster.gpu
    is_other = (gpu.name, here.gpus_per_node) != (planned.gpu.name, planned.gpus_per_node)
    cards = f"planned for {planned.gpus_per_node} x {planned.gpu.name} a node, but {case.site.name} has "
    cards += f"{here.gpus_per_node} x {gpu.name}"
    names = {
        "gpus": ("nodes", "use fewer GPUs"),
        "tp": ("tp", f"a tp that divides {here.gpus_per_node}"),
    }
    broken = [
        (names[rule.field], rule.message(t, here))
        for rule in CLUSTER_RULES
        if not rule.holds(t, here)
    ]
    reason = untrainable_reason(t) or ""
    # torch's is_bf16_supported() is True on a V100, which only emulates it
    no_bf16 = t.precision == "bf16" and gpu.kind == "cuda" and gpu.compute_capability < (8, 0)
    return [
        (
            reason,
            "engine",
            REFUSAL,
            reason,
            "train it with the program that can (trilane convert megatron)",
        ),
        (
            is_other,
            "cluster",
            REFUSAL,
            cards,
            f"search again with --cluster {here.name}, or choose another site",
        ),
        *((True, name, REFUSAL, message, remedy) for (name, remedy), message in broken),
        (
            no_bf16,
            "precision",
            REFUSAL,
            f"{gpu.name} has no bf16",
            "use fp16 with a loss scale, or an A100 and later",
        ),
    ]


def limits(case: JobCheck) -> list[Row]:
    """The script's time and GPUs against its QoS, and its account against the site's."""
    site, limit, ending = case.site, case.limit_s, case.site.account_ending
    gpus, account = (
        (case.nodes + case.spares) * case.gpus_per_node,
        case.directives.get("account", ""),
    )
    other = f"account {account or '(none)'} does not end with {ending}"
    rows: list[Row] = [
        (not account.endswith(ending), "account", REFUSAL, other, f"--account PROJECT{ending}")
    ]
    if qos := site.limits(case.directives.get("qos", "")):
        fits = [q.name for q in site.qos if limit <= q.hours * 3600 and gpus <= q.gpus]
        shorter = f"ask for {qos.hours:g} h and chain jobs" + (
            f", or --qos {fits[0]}" if fits else ""
        )
        hours = "no time limit" if limit == math.inf else f"{limit / 3600:g} h"
        too_long, many = (
            f"{hours}, {qos.name} allows {qos.hours:g} h",
            f"{gpus} GPUs, {qos.name} allows {qos.gpus}",
        )
        rows.append((limit > qos.hours * 3600, "qos time", REFUSAL, too_long, shorter))
        rows.append((gpus > qos.gpus, "qos gpus", REFUSAL, many, "another QoS or a reservation"))
    return rows


def memory(case: JobCheck) -> list[Row]:
    """The fullest stage against the card; an offload, and the copy that a save is written from,
    against the node's memory. The copy is there from the start of a run that saves.
    """
    p, used, plan = case.prediction, case.gpus_per_node, case.plan
    need = (
        f"predicted {p.memory_bytes / 2**30:.1f} of {case.cluster.gpu.memory_bytes / 2**30:.1f} GiB"
    )
    need += f", probability of running out {p.oom_probability:.0%}"
    level = REFUSAL if p.oom_probability > IMPOSSIBLE else WARNING
    offload, has = p.host_memory_bytes * used / 1e9, case.cluster.host_memory_bytes / 1e9
    copy = used / plan.topology.gpus * checkpoint_bytes(plan.shape) / 1e9 * plan.run.saves_at_end
    both = f"the offload takes {offload:.0f} GB and a save's copy {copy:.0f} GB of a node's {has:.0f} GB"
    smaller = "smaller mbs, recompute full, more tp or pp, a higher ZeRO stage"
    return [
        (level == REFUSAL or p.is_risky, "memory", level, need, smaller),
        (offload + copy > has, "host memory", REFUSAL, both, "more nodes, or no offload"),
    ]


def traced(case: JobCheck) -> list[Row]:
    """Many GPUs wait for what a laptop could have found: the engine's own memory and messages,
    stage by stage.
    """
    plan, gpus = case.plan, case.plan.topology.gpus
    is_dear = gpus > 32 and not plan.layer and trace_of(plan, case.folder / "plan.json") is None
    text = (
        f"{gpus} GPUs, and the engine has not run this plan at its size: memory is predicted alone"
    )
    return [
        (is_dear, "trace", WARNING, text, "`trilane measure plan PLAN --trace` (minutes, no GPU)")
    ]


def data(case: JobCheck) -> list[Row]:
    """The corpus exists where the job looks for it, and is prepared if it is large; all nodes share
    what they use.
    """
    plan, site, here, many = case.plan, case.site, case.folder.resolve(), case.nodes > 1
    # relative paths begin in the run folder of a job; here, in the current folder
    base, rows = Path() if site.is_local else here, list[Row]()
    sources = [part.source for part in plan.data.parts if part.source not in BUILT_IN]
    for source in sources:
        exists = any((base / (source + ending)).exists() for ending in ("", ".idx", ".bin"))
        text = f"data.source={source}: no such file, folder or .bin/.idx pair"
        rows.append((not exists, "data", REFUSAL, text, "name an existing one"))
    for source, size in ({} if site.is_local else unprepared(plan.data.parts, here)).items():
        waits = f"{size / 1e9:.3g} GB of text are not prepared, and {case.nodes} nodes would wait"
        remedy = "`trilane slurm script --template prepare`, and `sbatch` in the run folder"
        rows.append((True, "corpus", REFUSAL, f"data.source={source}: {waits}", remedy))
    for path in (here, *((base / name).resolve() for name in (plan.data.folder, *sources))):
        own = next((place for place in site.local if path.is_relative_to(place)), None)
        text = f"{path} lies below {own}, which {'is local to each node' if many else 'may differ on the node'}"
        is_wrong, level = own and (many or not site.is_local), REFUSAL if many else WARNING
        rows.append((is_wrong, "shared", level, text, "move it"))
    return rows


def storage(case: JobCheck) -> list[Row]:
    """The checkpoints' bytes and inodes are free, and the folder is unused, or its run can be
    resumed.

    Under a project quota statvfs reports the project's. Left out: quotas by user or group, which
    only the site's own tools report.
    """
    run, folder, here = case.plan.run, case.folder, case.folder.resolve()
    place = next(p for p in (here, *here.parents) if p.exists())
    free, inodes = available(place)
    saves = run.goal // run.save_interval if run.save_interval else 0
    kept = min(saves, run.keep_last or saves) + 1  # and the one being written
    need, files = (
        kept * checkpoint_bytes(case.plan.shape),
        kept * checkpoint_files(case.plan.topology.gpus),
    )
    takes = f"checkpoints take up to {need / 1e9:,.1f} GB, {place} has {free / 1e9:,.1f} GB free"
    many = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes free"
    is_done, is_lost = is_completed(folder), is_started(folder) and latest(folder / FOLDER) is None
    lost = f"{folder} holds a run without a checkpoint: its files go to attempts/, and it starts from iteration 0"
    level, fewer, other = (
        REFUSAL if need > free else WARNING,
        "smaller keep_last, or delete files",
        "",
    )
    try:
        # an earlier link of a chain may have none yet
        if not run.load or found_in(Path(run.load)):
            require_continuable(folder, case.plan)
    except ValueError as error:
        other = str(error)
    return [
        (need > free / 2, "disk", level, takes, fewer),
        (files > inodes, "inodes", REFUSAL, many, fewer),
        (
            is_done,
            "run folder",
            REFUSAL,
            f"{folder} holds a completed run",
            "take a new run folder",
        ),
        (
            is_lost and not is_done,
            "run folder",
            WARNING,
            lost,
            "take a new run folder to keep both",
        ),
        (
            other,
            "checkpoint",
            REFUSAL,
            other,
            "start from another checkpoint (run.load), or correct the plan",
        ),
    ]


def time(case: JobCheck) -> list[Row]:
    """The training ends, or saves a checkpoint, before the job's time limit, and often enough for
    its failures.
    """
    run, needs, limit = case.plan.run, case.needed_s, case.limit_s
    interval, own = run.save_interval * case.prediction.sec_per_it, run.exit_duration_minutes
    is_long, asked = needs > limit, "signal" in case.directives or own > 0
    loses_all = is_long and not asked and not 0 < interval < limit
    count = f"{run.goal - run.start_iteration} iterations{' with their evaluations' * bool(run.eval_interval)}"
    lasts = f"{count} take {needs / 3600:.1f} h, the limit is {limit / 3600:.1f} h"
    late = f"exit_duration_minutes={own:g} is beyond the limit of {limit / 60:.0f} minutes"
    ways = "save_interval, exit_duration_minutes or --signal-s"
    return [
        (0 < limit < own * 60, "time", REFUSAL, late, "end the run some minutes before the limit"),
        (loses_all, "checkpoints", REFUSAL, f"{lasts}, and no checkpoint is saved before", ways),
        (
            is_long and not loses_all,
            "time",
            WARNING,
            lasts,
            "submit jobs one after another, as a chain",
        ),
    ]


def interval(case: JobCheck) -> list[Row]:
    """Checkpoints are saved about as often as pays: Daly's optimum for the failures of so many
    nodes.

    An interval T of saves of d seconds costs the share d / T + T r / 2 at r failures a second; the
    run itself is the longest interval. Named where it costs 1 % of the time more, of a run of more
    than an hour.
    """
    model, save_s, needs, each = case.risks, case.save_s, case.needed_s, case.prediction.sec_per_it
    rate, best = model.stops_per_s(case.nodes), model.checkpoint_interval_s(save_s, case.nodes)
    own = case.plan.run.save_interval * each or needs
    mine, least = (save_s / t * (t < needs) + min(t, needs) * rate / 2 for t in (own, best))
    often = (
        "no checkpoint before the end" if own >= needs else f"a checkpoint every {own / 60:.0f} min"
    )
    text = f"{often}: {mine - least:.0%} of the time more than with Daly's {best / 60:.0f} min; {case.nodes} nodes "
    text += f"fail every {1 / rate / 3600:.0f} h (forecast's rates), a save takes {save_s:.0f} s "
    text += f"({model.storage})"
    remedy = f"save_interval={max(1, round(best / each))}"
    return [(needs > 3600 and mine - least > 0.01, "checkpoints", WARNING, text, remedy)]


def warning(case: JobCheck) -> list[Row]:
    """The warning before the limit leaves time for the iteration, or evaluation, that goes on, and
    for a save.

    A job that begins later than its warning comes, or so shortly before that no iteration fits,
    only saves.
    """
    own, limit = case.plan.run.exit_duration_minutes * 60, case.limit_s
    step_s, save_s = case.prediction.sec_per_it + case.evaluation_s, case.save_s
    # man sbatch, --signal: 60 s where no time is given, sent up to 60 s earlier; so a margin on
    # what is predicted
    margin, shortest = 1.5, 60
    if (
        limit == math.inf or case.needed_s * margin <= limit
    ):  # it ends before, even if predicted too short
        return []
    signal = re.fullmatch(r"(?:R?B?:)?\w+(?:@(\d+))?", case.directives.get("signal", ""))
    signal_s = float(signal[1] or shortest) if signal else 0.0
    left, need = max(signal_s, limit - own if own else 0.0), step_s + save_s
    step = f"{step_s:.0f} s of an iteration{' and an evaluation' * (case.evaluation_s > 0)}"
    enough = math.ceil(max(margin * need, shortest) / 30) * 30
    remedy = (
        f"--signal-s {enough}"
        if left == signal_s
        else f"at most {(limit - enough) / 60:.0f} minutes"
    )
    text = f"{left:.0f} s before the limit are less than {need:.0f} s ({step}, {save_s:.0f} s of a save, predicted)"
    level = REFUSAL if left < case.prediction.sec_per_it else WARNING
    return [(0 < left < need, "signal", level, f"{text}: nothing is saved", remedy)]


def purpose(case: JobCheck) -> list[Row]:
    """Tokens and epochs are those of a training of that size; a benchmark is called one, once."""
    plan, size, count = case.plan, case.plan.shape.parameters, case.plan.run.train_iters
    tokens, rows = plan.samples * plan.shape.seq_length, list[Row]()
    each, is_benchmark = tokens / size, count <= 1000 and tokens < size
    if case.site.is_local:
        return []
    # no published training has fewer than one token a parameter: OPT-175B had 180e9 tokens (Zhang
    # et al. 2022, arXiv:2205.01068), GPT-3 1.7 a parameter, BLOOM 2.1
    few = f"{count:,} iterations are {each:.2g} tokens for each of {size / 1e9:.3g}B parameters: "
    few += "a benchmark" if is_benchmark else "no published training has so few"
    wanted = math.ceil(TOKENS_PER_PARAMETER * size / plan.shape.seq_length)
    enough = f"train_iters={plan.run.ramp.iterations(wanted, plan.topology.gbs):,}"
    more = f"a training of {TOKENS_PER_PARAMETER:g} tokens a parameter (Chinchilla) takes {enough}"
    rows.append((each < 1, "tokens", WARNING, few, more))
    total = sum(part.weight for part in plan.data.blend)
    shares = [part.weight / total for part in plan.data.blend] or [1.0]
    for part, share in () if is_benchmark else zip(plan.data.parts, shares, strict=True):
        has = tokens_about(part, case.folder.resolve(), plan.shape.vocab_size) * plan.data.shares[0]
        epochs = tokens * share / has if has else 0.0
        text = f"data.source={part.source} has about {has:.2g} tokens to train on: {epochs:,.0f} epochs"
        # up to 4 epochs are nearly as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)
        rows.append(
            (epochs > 4, "epochs", WARNING, text, "more text: repetition teaches less and less")
        )
    return rows
