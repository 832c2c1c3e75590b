"""What is checked of a plan before a job costs anything: its nodes, limits, storage, time, and what it is for.

A check returns rows: whether something is wrong, the rule, how severe that is, a message and the remedy.
"""

import itertools
import math
import os
import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from trilane.config import cluster
from trilane.config.cluster import Cluster
from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import CLUSTER_RULES
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, Prediction, predict_on
from trilane.forecasting.failures import FailureModel, evaluation_s
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.space import divisors
from trilane.slurm import client
from trilane.slurm.script import SCRIPT, directives, nodes_of
from trilane.slurm.sites import JobRequest, Site, seconds_of
from trilane.utils.files import json_lines, read_text
from trilane.utils.validation import DATA, read_json, require_known
from trilane.workspace.checkpoints import FOLDER, checkpoint_bytes, found_in, latest
from trilane.workspace.continuation import require_continuable
from trilane.workspace.prepared_corpora import BUILT_IN, tokens_about, unprepared
from trilane.workspace.run_folder import STEPS, is_completed, is_started

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
    name: str = SCRIPT  # the script's file
    calibration: Calibration | None = None  # the constants that predicted the plan

    @cached_property
    def cluster(self) -> Cluster:
        """The nodes that the job gets."""
        return nodes_of(self.plan, self.site)

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted time and memory on these nodes."""
        return predict_on(self.plan, self.cluster, self.calibration)

    @cached_property
    def directives(self) -> dict[str, str]:
        """The script's own #SBATCH options, which are decisive; ValueError where they cannot be read."""
        return directives(self.script)

    @property
    def limit_s(self) -> float:
        """The job's time limit; ten minutes where the script names none, as many sites have it."""
        return seconds_of(self.directives.get("time", "00:10:00"))

    @cached_property
    def slurm_problem(self) -> str:
        """Why SLURM cannot be asked: it is not installed here, or does not answer; "" where it can."""
        try:
            client.require_answer()
        except client.SlurmUnreachable as error:
            return str(error)
        return "" if client.is_installed() else "sbatch is not installed here, so SLURM was not asked"

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
        """Nodes that the script asks for beyond those, and can use: a dead one must not end the job."""
        asked = self.directives.get("nodes", "")
        return max(0, int(asked) - self.nodes) if "no-kill" in self.directives and asked.isdecimal() else 0


def nodes(case: JobCheck) -> list[Row]:
    """The plan's GPUs are the site's, and the topology obeys these nodes."""
    t, here, planned, gpu = case.plan.topology, case.cluster, case.plan.cluster, case.cluster.gpu
    is_other = (gpu.name, here.gpus_per_node) != (planned.gpu.name, planned.gpus_per_node)
    cards = f"planned for {planned.gpus_per_node} x {planned.gpu.name} a node, but {case.site.name} has "
    cards += f"{here.gpus_per_node} x {gpu.name}"
    search = f"search again with --cluster {here.name}, or choose the site of {planned.name}"
    choices = f"choose tp among {', '.join(map(str, divisors(here.gpus_per_node)))}"
    remedies = {"gpus": ("nodes", "use fewer GPUs"), "tp": ("tp", choices)}
    broken = [(remedies[rule.field], rule.message(t, here)) for rule in CLUSTER_RULES if not rule.holds(t, here)]
    reason = untrainable_reason(t) or ""
    # torch's is_bf16_supported() is True on a V100, which only emulates it
    no_bf16 = t.precision == "bf16" and gpu.kind == "cuda" and gpu.compute_capability < (8, 0)
    is_known = case.site.cluster or case.site.is_local or planned.name in cluster.catalogue()
    assumed = f"site {case.site.name} names no cluster: its nodes are assumed to be those of the plan"
    return [
        (reason, "engine", REFUSAL, reason, "train it with the program that can (trilane convert megatron)"),
        (is_other, "cluster", REFUSAL, cards, search),
        *((True, name, REFUSAL, message, remedy) for (name, remedy), message in broken),
        (no_bf16, "precision", REFUSAL, f"{gpu.name} has no bf16", "use fp16 with a loss scale, or an A100 and later"),
        (not is_known, "site", WARNING, assumed, "copy data/sites/generic.json and fill it in"),
    ]


def wheel(case: JobCheck) -> list[Row]:
    """The installed torch holds kernels for the card; torch's version.py is read, torch is not imported."""
    gpu, site, place = case.cluster.gpu, case.site, case.request.environment
    if gpu.kind != "cuda":
        return []
    found = find_spec("torch") if not place else None
    places = [Path(found.origin).with_name("version.py")] if found and found.origin else []
    places += Path(place).glob("lib/python3*/site-packages/torch/version.py") if place[:1] == "/" else []
    if site.container or not places:
        unseen = "is the container's, which was not looked into" if site.container else "was not found from here"
        return [(True, "wheel", WARNING, f"torch {unseen}", "import torch there on a login node")]
    text = places[0].read_text(encoding="utf-8")
    version = (re.findall(r"__version__ = '([^']+)'", text) or ["?"])[0]
    cuda = (re.findall(r"^cuda\b[^=]*= '([^']+)'", text, re.M) or [""])[0]
    of_torch, of_cuda = (tuple(int(n) for n in re.findall(r"\d+", number)[:2]) for number in (version, cuda))
    # from 2.11 on only the CUDA 12.6 builds hold sm_70, and CUDA 13 no longer has it
    is_certain, is_volta = of_torch >= (2, 11) or of_cuda >= (13, 0), gpu.compute_capability == (7, 0)
    build = f"torch {version} is built for {'CUDA ' + cuda if cuda else 'no CUDA'}"
    kernels = f"{build}: {'no' if is_certain else 'perhaps no'} kernels for {gpu.name} (sm_70)"
    install = "install from https://download.pytorch.org/whl/cu126 (environment.yml, the V100 variant)"
    lacks, level = cuda and is_volta and cuda != "12.6", REFUSAL if is_certain else WARNING
    return [
        (not cuda, "wheel", REFUSAL, f"{build}, the nodes have {gpu.name}", "install the wheel of the card's CUDA"),
        (lacks, "wheel", level, kernels, install),
    ]


def limits(case: JobCheck) -> list[Row]:
    """The script's time and GPUs against its QoS, and its account against the site's."""
    site, limit = case.site, case.limit_s
    gpus, account = (case.nodes + case.spares) * case.gpus_per_node, case.directives.get("account", "")
    name, ending = case.directives.get("qos", ""), site.account_ending
    rows: list[Row] = []
    if site.qos and name not in ("", *(q.name for q in site.qos)):
        try:
            require_known("qos", name, [q.name for q in site.qos])
        except ValueError as error:
            text = f"{error}; its longest job and most GPUs are unknown here, so they were not checked"
            rows.append((True, "qos", WARNING, text, f"sacctmgr show qos {name}, and add it to the site's file"))
    if qos := site.limits(name):
        fits = [q.name for q in site.qos if limit <= q.hours * 3600 and gpus <= q.gpus]
        shorter = f"ask for {qos.hours:g} h and chain jobs" + (f", or --qos {fits[0]}" if fits else "")
        hours = "no time limit" if limit == math.inf else f"{limit / 3600:g} h"
        too_long, many = f"{hours}, {qos.name} allows {qos.hours:g} h", f"{gpus} GPUs, {qos.name} allows {qos.gpus}"
        rows.append((limit > qos.hours * 3600, "qos time", REFUSAL, too_long, shorter))
        rows.append((gpus > qos.gpus, "qos gpus", REFUSAL, many, "another QoS or a reservation"))
    other = f"account {account or '(none)'} does not end with {ending}"
    return [*rows, (not account.endswith(ending), "account", REFUSAL, other, f"--account PROJECT{ending}")]


def memory(case: JobCheck) -> list[Row]:
    """The fullest stage against the card; an offload, and the copy that a save is written from, against the node's
    memory. The copy is there from the start of a run that saves."""
    p, used, plan = case.prediction, case.gpus_per_node, case.plan
    need = f"predicted {p.memory_bytes / 2**30:.1f} of {case.cluster.gpu.memory_bytes / 2**30:.1f} GiB"
    need += f", probability of running out {p.oom_probability:.0%}"
    level = REFUSAL if p.oom_probability > IMPOSSIBLE else WARNING
    smaller = "smaller mbs, recompute full, more tp or pp, a higher ZeRO stage"
    host, has = p.host_memory_bytes * used / 1e9, case.cluster.host_memory_bytes / 1e9
    copy = used / plan.topology.gpus * checkpoint_bytes(plan.shape) / 1e9 * plan.run.saves_at_end
    offload = f"the offload takes {host:.0f} GB of a node's {has:.0f} GB"
    both = f"a save's copy, with the offload, takes {host + copy:.0f} GB of a node's {has:.0f} GB"
    return [
        (level == REFUSAL or p.is_risky, "memory", level, need, smaller),
        (host > has, "host memory", REFUSAL, offload, "more replicas, or no offload"),
        (host <= has < host + copy, "host memory", REFUSAL, both, "more nodes, or no offload"),
    ]


def data(case: JobCheck) -> list[Row]:
    """The corpus exists where the job looks for it, and is prepared if it is large; all nodes share what they use."""
    plan, site, here = case.plan, case.site, case.folder.resolve()
    # relative paths begin in the run folder of a job; here, in the current folder
    base, rows = Path() if site.is_local else here, list[Row]()
    sources = [part.source for part in plan.data.parts if part.source not in BUILT_IN]
    for source in sources:
        exists = any((base / (source + ending)).exists() for ending in ("", ".idx", ".bin"))
        text = f"data.source={source}: no such file, folder or .bin/.idx pair"
        rows.append((not exists, "data", REFUSAL, text, "name an existing one"))
    prepare = "`trilane slurm prepare` on the run, or `trilane slurm submit --prepare`"
    for source, size in ({} if site.is_local else unprepared(plan.data.parts, here)).items():
        waits = f"{size / 1e9:.3g} GB of text are not prepared, and {case.nodes} nodes would wait"
        rows.append((True, "corpus", REFUSAL, f"data.source={source}: {waits}", prepare))
    paths = [("data.folder", plan.data.folder), *(("data.source", source) for source in sources)]
    for name, path in [("run folder", here), *((n, (base / p).resolve()) for n, p in paths)]:
        own = next((place for place in site.local if path.is_relative_to(place)), None)
        where = "is local to each node" if case.nodes > 1 else "may differ on the compute node"
        level, is_wrong = (REFUSAL, own) if case.nodes > 1 else (WARNING, own and not site.is_local)
        rows.append((is_wrong, "shared", level, f"{name} {path} lies below {own}, which {where}", "move it"))
    return rows


def storage(case: JobCheck) -> list[Row]:
    """The checkpoints' bytes and inodes are free, and the folder is unused, or its run can be resumed.

    Under a project quota statvfs reports the project's. Left out: quotas by user or group, which only the site's own
    tools report.
    """
    run, folder, here = case.plan.run, case.folder, case.folder.resolve()
    place = next(p for p in (here, *here.parents) if p.exists())
    free, inodes = available(place)
    saves = run.goal // run.save_interval if run.save_interval else 0
    kept = min(saves, run.keep_last or saves) + 1  # and the one being written
    need, files = kept * checkpoint_bytes(case.plan.shape), kept * (2 * case.plan.topology.gpus + 3)
    takes = f"checkpoints take up to {need / 1e9:,.1f} GB, {place} has {free / 1e9:,.1f} GB free"
    many = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes free"
    fewer = "smaller keep_last, larger save_interval, or another file system"
    is_done, is_lost = is_completed(folder), is_started(folder) and latest(folder / FOLDER) is None
    lost = f"{folder} holds a run without a checkpoint: its files go to attempts/, and it starts from iteration 0"
    other = ""
    try:
        # an earlier link of a chain may have none yet
        if not run.load or found_in(Path(run.load)):
            require_continuable(folder, case.plan)
    except ValueError as error:
        other = str(error)
    return [
        (need > free, "disk", REFUSAL, takes, fewer),
        (free >= need > free / 2, "disk", WARNING, takes, "smaller keep_last, or delete files"),
        (files > inodes, "inodes", REFUSAL, many, "delete files, or a smaller keep_last"),
        (is_done, "run folder", REFUSAL, f"{folder} holds a completed run", "take a new run folder"),
        (is_lost and not is_done, "run folder", WARNING, lost, "take a new run folder to keep both"),
        (other, "checkpoint", REFUSAL, other, "start from another checkpoint (run.load), or correct the plan"),
    ]


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of a file system; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a run's iteration, save and evaluation, measured in its folder before or predicted; and of all."""

    iteration_s: float
    save_s: float
    evaluation_s: float
    is_measured: bool
    needed_s: float


def pace(case: JobCheck) -> Pace:
    """The pace of the run: the median of its last iterations and the slowest of its last saves, else as predicted.

    A save is predicted by the forecast's bandwidth (data/risks.json: 1 GB/s a node, assumed), an evaluation as
    forward passes. Left out: that a later part of a batch ramp-up is slower.
    """
    plan, run, last = case.plan, case.plan.run, 1 << 24  # bytes: the files may have gigabytes
    steps = [step.get("sec_per_it") for step in json_lines(read_text(case.folder / STEPS, last))]
    seconds = statistics.median([s for s in steps if isinstance(s, float) and 0 < s < math.inf] or [0.0])
    # as the engine prints it: "saved checkpoints/iter_0000010 (12.3 MB in 0.42 s, ..."
    form = r"saved checkpoints/iter_\d+ \([\d.]+ MB in ([\d.]+) s"
    saves = [float(s) for s in re.findall(form, read_text(case.folder / "run.log", last))]
    iteration_s, count = seconds or case.prediction.sec_per_it, run.goal - run.start_iteration
    evaluation = evaluation_s(plan.topology, run.eval_iters, iteration_s)
    return Pace(
        iteration_s=iteration_s,
        save_s=max(saves, default=FailureModel().save_s(checkpoint_bytes(plan.shape), case.nodes)),
        evaluation_s=evaluation,
        is_measured=seconds > 0 and bool(saves),
        needed_s=count * iteration_s + (count // run.eval_interval if run.eval_interval else 0) * evaluation,
    )


def time(case: JobCheck) -> list[Row]:
    """The training ends, or saves a checkpoint, before the job's time limit, and often enough for its failures."""
    run, at, limit = case.plan.run, pace(case), case.limit_s
    needs, interval, own = at.needed_s, run.save_interval * at.iteration_s, run.exit_duration_minutes
    is_long, asked = needs > limit, "signal" in case.directives or own > 0
    loses_all, is_rare = is_long and not asked and not 0 < interval < limit, is_long and limit / 10 < interval
    count = f"{run.goal - run.start_iteration} iterations{' with their evaluations' * bool(run.eval_interval)}"
    lasts = f"{count} take {needs / 3600:.1f} h, the limit is {limit / 3600:.1f} h"
    parts = f"{lasts}: {-(-needs // limit):.0f} jobs one after another"
    late = f"exit_duration_minutes={own:g} is beyond the limit of {limit / 60:.0f} minutes"
    never = "without a time limit SLURM sends no signal before it, and no checkpoint is saved before the end"
    rare = f"a checkpoint every {interval / 3600:.1f} h: a failure loses as much"
    oftener = f"save_interval={max(1, int(limit / 10 / at.iteration_s))}" if is_rare else ""
    never_saves, ways = (
        limit == math.inf and not run.save_interval,
        "save_interval, exit_duration_minutes or --signal-s",
    )
    return [
        (0 < limit < own * 60, "time", REFUSAL, late, "end the run some minutes before the limit"),
        (never_saves, "checkpoints", WARNING, never, "save_interval, or a time limit"),
        (loses_all, "checkpoints", REFUSAL, f"{lasts}, and no checkpoint is saved before", ways),
        (is_long and not loses_all, "time", WARNING, parts, "submit them as a chain"),
        (is_rare, "checkpoints", WARNING, rare, oftener),
        *([] if never_saves or is_rare else _against_failures(case, at)),
    ]


def _against_failures(case: JobCheck, at: Pace) -> list[Row]:
    """The interval between checkpoints against Daly's optimum for the failures of so many nodes.

    An interval T of saves of d seconds costs the share d / T + T r / 2 at r failures a second.
    """
    model, needs = FailureModel(), at.needed_s
    rate, best = model.stops_per_s(case.nodes), model.checkpoint_interval_s(at.save_s, case.nodes)
    interval = min(case.plan.run.save_interval * at.iteration_s or needs, needs)

    def cost(every_s: float) -> float:
        return at.save_s / every_s * (every_s < needs) + every_s * rate / 2

    lost = cost(interval) - cost(min(best, needs))
    often = "no checkpoint before the end" if interval == needs else f"a checkpoint every {interval / 60:.0f} min"
    fail = f"{case.nodes} nodes fail every {1 / rate / 3600:.0f} h (forecast's rates), a save takes {at.save_s:.0f} s"
    message = f"{often}: {lost:.0%} of the time more than with Daly's {best / 60:.0f} min; {fail}"
    remedy = f"save_interval={max(1, round(best / at.iteration_s))}"
    # where it costs 1 % of the time more, of a run of more than an hour, which is the most that it can lose
    return [(needs > 3600 and lost > 0.01, "checkpoints", WARNING, message, remedy)]


def warning(case: JobCheck) -> list[Row]:
    """The warning before the limit leaves time for the iteration, or evaluation, that goes on, and for a save.

    A job that begins later than its warning comes, or so shortly before that no iteration fits, only saves.
    """
    at, own, limit = pace(case), case.plan.run.exit_duration_minutes * 60, case.limit_s
    # man sbatch, --signal: 60 s where no time is given, sent up to 60 s earlier; so a margin on what is predicted
    margin, shortest = 1.5, 60
    if limit == math.inf or at.needed_s * margin <= limit:  # it ends before, even if predicted too short
        return []
    signal = re.fullmatch(r"(?:R?B?:)?\w+(?:@(\d+))?", case.directives.get("signal", ""))
    signal_s = float(signal[1] or shortest) if signal else 0.0
    left, start = max(signal_s, limit - own if own else 0.0), FailureModel().startup_s
    need = at.iteration_s + at.evaluation_s + at.save_s
    step = f"{need - at.save_s:.0f} s of an iteration{' and an evaluation' * (at.evaluation_s > 0)}"
    step += f", {at.save_s:.0f} s of a save, {'measured' if at.is_measured else 'predicted'}"
    enough = math.ceil(max(margin * need, shortest) / 30) * 30
    remedy = f"--signal-s {enough}" if left == signal_s else f"at most {(limit - enough) / 60:.0f} minutes"
    level = REFUSAL if at.is_measured or left < at.iteration_s else WARNING
    short = f"{left:.0f} s before the limit are less than {need:.0f} s ({step}): nothing is saved"
    holds = f"{limit / 60:.0f} min hold no start ({start / 60:.0f} min, assumed), iteration and save ({step})"
    longer = f"a limit of {math.ceil((start + 2 * max(left, need)) / 600) * 10} minutes or more"
    return [
        (0 < left < need, "signal", level, short, remedy),
        (limit < start + need + max(left, 0.0), "time", WARNING, holds, longer),
    ]


def purpose(case: JobCheck) -> list[Row]:
    """Tokens, epochs and learning rate are those of a training of that size; a benchmark is called one, once."""
    plan, size, count, rate = case.plan, case.plan.shape.parameters, case.plan.run.train_iters, case.plan.optimizer.lr
    tokens, rows = plan.samples * plan.shape.seq_length, list[Row]()
    each, is_benchmark = tokens / size, count <= 1000 and tokens < size
    if case.site.is_local:
        return []
    # no published training has fewer than one token a parameter: OPT-175B had 180e9 tokens (Zhang et al. 2022,
    # arXiv:2205.01068), GPT-3 1.7 a parameter, BLOOM 2.1
    few = f"{count:,} iterations are {each:.2g} tokens for each of {size / 1e9:.3g}B parameters: "
    few += "a benchmark" if is_benchmark else "no published training has so few"
    enough = f"train_iters={math.ceil(count * TOKENS_PER_PARAMETER / each):,}"
    more = f"a training of {TOKENS_PER_PARAMETER:g} tokens a parameter (Chinchilla) takes {enough}"
    rows.append((each < 1, "tokens", WARNING, few, more))
    if is_benchmark:
        return rows
    total = sum(part.weight for part in plan.data.blend) or 1.0
    shares = [part.weight / total for part in plan.data.blend] or [1.0]
    for part, share in zip(plan.data.parts, shares, strict=True):
        has = tokens_about(part, case.folder.resolve(), plan.shape.vocab_size) * plan.data.shares[0]
        epochs = tokens * share / has if has else 0.0
        text = f"data.source={part.source} has about {has:.2g} tokens to train on: {epochs:,.0f} epochs"
        # up to 4 epochs are nearly as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)
        rows.append(
            (epochs > 4, "epochs", WARNING, text, "more text: beyond 4 epochs repetition teaches less and less")
        )
    low, high = known_rates(size)
    about = f"{low:.1e}" if math.isclose(low, high, rel_tol=0.05) else f"{low:.1e} to {high:.1e}"
    odd = f"lr={rate:g}: trainings of {size / 1e9:.3g}B parameters have used {about} (GPT-3, LLaMA, BLOOM)"
    # three times beyond what is known; models below GPT-3's smallest bear more, and cost nothing
    is_odd = size >= 125e6 and not low / 3 <= rate <= high * 3
    return [*rows, (is_odd, "learning rate", WARNING, odd, f"optimizer.lr between {low:.1e} and {high:.1e}")]


def known_rates(size: float) -> tuple[float, float]:
    """The lowest and highest learning rate of published trainings of that size."""
    tables = read_json(DATA / "learning_rates.json", "data")
    return _between(tables["lowest"], size), _between(tables["highest"], size)


def _between(table: list[list[float]], size: float) -> float:
    # on a logarithmic scale of sizes
    for (small, left), (large, right) in itertools.pairwise(table):
        if size <= large:
            x = max(0.0, math.log(size / small) / math.log(large / small))
            return float(left ** (1 - x) * right**x)
    return table[-1][1]
