"""What is checked of a plan before a job costs anything: its nodes, limits, storage, time, and what
it is for.
"""

import math
import re
from collections.abc import Iterator
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
from trilane.workspace.checkpoints import checkpoint_bytes, checkpoint_files, found_in
from trilane.workspace.continuation import require_continuable
from trilane.workspace.prepared_corpora import BUILT_IN, unprepared
from trilane.workspace.run import Run, is_started
from trilane.workspace.storage import available

REFUSAL = "refusal"
WARNING = "warning"
# where many GPUs would wait for what a laptop could have found
MANY_GPUS = 32
# with less than a token a parameter, too
BENCHMARK_ITERS = 1000
# what is predicted may take so much longer
MARGIN = 1.5
# man sbatch, --signal: 60 s where no time is given, sent up to 60 s earlier
SIGNAL_S = 60


@dataclass(frozen=True, kw_only=True)
class JobFinding:
    """One problem of a job, certain (a refusal) or likely (a warning), with its remedy."""

    level: str
    rule: str
    message: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The JSON object of `trilane slurm check`; the key of the message is `says`."""
        return {"level": self.level, "rule": self.rule, "says": self.message, "remedy": self.remedy}

    def summary(self) -> str:
        """Two lines of text."""
        return f"{self.level:7} [{self.rule}] {self.message}\n        {self.remedy}"


Findings = Iterator[JobFinding]


def refusal(rule: str, message: str, remedy: str) -> JobFinding:
    """A finding for which nothing is submitted."""
    return JobFinding(level=REFUSAL, rule=rule, message=message, remedy=remedy)


def warning(rule: str, message: str, remedy: str) -> JobFinding:
    """A finding that is only shown."""
    return JobFinding(level=WARNING, rule=rule, message=message, remedy=remedy)


@dataclass(frozen=True)
class JobCheck:
    """A job before its submission: a plan, the run folder, and its script, edited by
    hand or not.
    """

    plan: Plan
    site: Site
    request: JobRequest
    run: Run
    script: str

    @cached_property
    def folder(self) -> Path:
        """The run folder, from the root."""
        return self.run.folder.resolve()

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
    def save_s(self) -> float:
        """Seconds of a save, by the storage that was measured on the nodes of the job, or of the
        plan, else by the forecast's bandwidth.
        """
        risks = FailureModel().measured(self.cluster).measured(self.plan.cluster)
        return risks.save_s(checkpoint_bytes(self.plan.shape), self.nodes)

    @property
    def evaluation_s(self) -> float:
        """Seconds of an evaluation, as forward passes."""
        each = self.prediction.sec_per_it
        return evaluation_s(self.plan.topology, self.plan.run.eval_iters, each)

    @property
    def needed_s(self) -> float:
        """Seconds of all iterations with their evaluations; left out: that larger batches of a
        ramp-up are slower.
        """
        run = self.plan.run
        count = run.goal - run.start_iteration
        seconds = count * self.prediction.sec_per_it
        if run.eval_interval:
            seconds += count // run.eval_interval * self.evaluation_s
        return seconds

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
        nodes = self.directives.get("nodes", "")
        if "no-kill" not in self.directives or not nodes.isdecimal():
            return 0
        return max(0, int(nodes) - self.nodes)


def nodes(job: JobCheck) -> Findings:
    """The plan's GPUs are the site's, and the topology obeys these nodes."""
    topology = job.plan.topology
    here = job.cluster
    planned = job.plan.cluster
    if reason := untrainable_reason(topology):
        remedy = "train it with the program that can (trilane convert megatron)"
        yield refusal("engine", reason, remedy)
    width = here.gpus_per_node
    if (here.gpu.name, width) != (planned.gpu.name, planned.gpus_per_node):
        message = f"planned for {planned.gpus_per_node} x {planned.gpu.name} a node, "
        message += f"but {job.site.name} has {width} x {here.gpu.name}"
        remedy = f"search again with --cluster {here.name}, or choose another site"
        yield refusal("cluster", message, remedy)
    for rule in CLUSTER_RULES:
        if not rule.holds(topology, here):
            if rule.field == "tp":
                yield refusal("tp", rule.message(topology, here), f"a tp that divides {width}")
            else:
                yield refusal("nodes", rule.message(topology, here), "use fewer GPUs")
    # torch's is_bf16_supported() is True on a V100, which only emulates it
    has_bf16 = here.gpu.kind != "cuda" or here.gpu.compute_capability >= (8, 0)
    if topology.precision == "bf16" and not has_bf16:
        remedy = "use fp16 with a loss scale, or an A100 and later"
        yield refusal("precision", f"{here.gpu.name} has no bf16", remedy)


def limits(job: JobCheck) -> Findings:
    """The script's time and GPUs against its QoS, and its account against the site's."""
    account = job.directives.get("account", "")
    ending = job.site.account_ending
    if not account.endswith(ending):
        message = f"account {account or '(none)'} does not end with {ending}"
        yield refusal("account", message, f"--account PROJECT{ending}")
    qos = job.site.limits(job.directives.get("qos", ""))
    if qos is None:
        return
    if job.limit_s > qos.hours * 3600:
        hours = f"{job.limit_s / 3600:g} h"
        if job.limit_s == math.inf:
            hours = "no time limit"
        remedy = f"ask for {qos.hours:g} h and chain jobs, or for another QoS"
        yield refusal("qos time", f"{hours}, {qos.name} allows {qos.hours:g} h", remedy)
    gpus = (job.nodes + job.spares) * job.gpus_per_node
    if gpus > qos.gpus:
        message = f"{gpus} GPUs, {qos.name} allows {qos.gpus}"
        yield refusal("qos gpus", message, "another QoS or a reservation")


def memory(job: JobCheck) -> Findings:
    """The fullest stage against the card; an offload, and the copy that a save is written from,
    against the node's memory. The copy is there from the start of a run that saves.
    """
    prediction = job.prediction
    need = prediction.memory_bytes / 2**30
    card = job.cluster.gpu.memory_bytes / 2**30
    message = f"predicted {need:.1f} of {card:.1f} GiB, probability of running out "
    message += f"{prediction.oom_probability:.0%}"
    remedy = "smaller mbs, recompute full, more tp or pp, a higher ZeRO stage"
    if prediction.oom_probability > IMPOSSIBLE:
        yield refusal("memory", message, remedy)
    elif prediction.is_risky:
        yield warning("memory", message, remedy)
    offload = prediction.host_memory_bytes * job.gpus_per_node / 1e9
    copy = 0.0
    if job.plan.run.saves_at_end:
        share = job.gpus_per_node / job.plan.topology.gpus
        copy = share * checkpoint_bytes(job.plan.shape) / 1e9
    has = job.cluster.host_memory_bytes / 1e9
    if offload + copy > has:
        message = f"the offload takes {offload:.0f} GB and a save's copy {copy:.0f} GB"
        yield refusal("host memory", f"{message} of a node's {has:.0f} GB", "more nodes")


def traced(job: JobCheck) -> Findings:
    """The engine has shown memory and messages of a large plan, stage by stage."""
    gpus = job.plan.topology.gpus
    if gpus <= MANY_GPUS or job.plan.layer or trace_of(job.plan, job.run.folder / "plan.json"):
        return
    message = f"{gpus} GPUs, and the engine has not run this plan at its size"
    yield warning("trace", message, "`trilane measure plan PLAN --trace` (minutes, no GPU)")


def data(job: JobCheck) -> Findings:
    """The corpus exists where the job looks for it, and is prepared if it is large; all nodes share
    what they use.
    """
    # relative paths begin in the run folder of a job; here, in the current folder
    base = job.folder
    if job.site.is_local:
        base = Path()
    sources = [part.source for part in job.plan.data.parts if part.source not in BUILT_IN]
    for source in sources:
        if not any((base / (source + ending)).exists() for ending in ("", ".idx", ".bin")):
            message = f"data.source={source}: no such file, folder or .bin/.idx pair"
            yield refusal("data", message, "name an existing one")
    if not job.site.is_local:
        for source, size in unprepared(job.plan.data.parts, job.folder).items():
            message = f"data.source={source}: {size / 1e9:.3g} GB of text are not prepared, "
            message += f"and {job.nodes} nodes would wait"
            remedy = "`trilane slurm script --template prepare`, and `sbatch` in the run folder"
            yield refusal("corpus", message, remedy)
    for name in (str(job.folder), job.plan.data.folder, *sources):
        path = (base / name).resolve()
        for place in job.site.local:
            if not path.is_relative_to(place):
                continue
            if job.nodes > 1:
                message = f"{path} lies below {place}, which is local to each node"
                yield refusal("shared", message, "move it")
            elif not job.site.is_local:
                message = f"{path} lies below {place}, which may differ on the node"
                yield warning("shared", message, "move it")


def storage(job: JobCheck) -> Findings:
    """The checkpoints' bytes and inodes are free, and the folder is unused, or its run can be
    resumed.

    Under a project quota statvfs reports the project's. Left out: quotas by user or group, which
    only the site's own tools report.
    """
    limits = job.plan.run
    place = next(folder for folder in (job.folder, *job.folder.parents) if folder.exists())
    free_bytes, inodes = available(place)
    saves = 0
    if limits.save_interval:
        saves = limits.goal // limits.save_interval
    count = min(saves, limits.keep_last or saves) + 1  # and the one being written
    need = count * checkpoint_bytes(job.plan.shape)
    files = count * checkpoint_files(job.plan.topology.gpus)
    message = f"checkpoints take up to {need / 1e9:,.1f} GB, {place} has {free_bytes / 1e9:,.1f} GB"
    fewer = "smaller keep_last, or delete files"
    if need > free_bytes:
        yield refusal("disk", f"{message} free", fewer)
    elif need > free_bytes / 2:
        yield warning("disk", f"{message} free", fewer)
    if files > inodes:
        message = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes free"
        yield refusal("inodes", message, fewer)
    folder = job.run.folder
    if job.run.is_completed:
        yield refusal("run folder", f"{folder} holds a completed run", "take a new run folder")
    elif is_started(folder) and job.run.newest is None:
        message = f"{folder} holds a run without a checkpoint: its files go to attempts/, "
        message += "and it starts from iteration 0"
        yield warning("run folder", message, "take a new run folder to keep both")
    # an earlier link of a chain may have no checkpoint yet
    if not limits.load or found_in(Path(limits.load)):
        try:
            require_continuable(folder, job.plan)
        except ValueError as error:
            remedy = "start from another checkpoint (run.load), or correct the plan"
            yield refusal("checkpoint", str(error), remedy)


def time(job: JobCheck) -> Findings:
    """The training ends, or saves a checkpoint, before the job's time limit."""
    run = job.plan.run
    limit_s = job.limit_s
    own_s = run.exit_duration_minutes * 60
    if 0 < limit_s < own_s:
        message = f"exit_duration_minutes={run.exit_duration_minutes:g} is beyond the limit of "
        message += f"{limit_s / 60:.0f} minutes"
        yield refusal("time", message, "end the run some minutes before the limit")
    if job.needed_s <= limit_s:
        return
    message = f"{run.goal - run.start_iteration} iterations take {job.needed_s / 3600:.1f} h, "
    message += f"the limit is {limit_s / 3600:.1f} h"
    interval_s = run.save_interval * job.prediction.sec_per_it
    if "signal" in job.directives or own_s or 0 < interval_s < limit_s:
        yield warning("time", message, "submit jobs one after another, as a chain")
    else:
        message += ", and no checkpoint is saved before"
        yield refusal("checkpoints", message, "save_interval, exit_duration_minutes or --signal-s")


def signal(job: JobCheck) -> Findings:
    """The warning before the limit leaves time for the iteration, or evaluation, that goes on, and
    for a save.

    A job that begins later than its warning comes, or so shortly before that no iteration fits,
    only saves.
    """
    # it ends before, even if predicted too short
    if job.needed_s * MARGIN <= job.limit_s:
        return
    left_s = 0.0
    if "signal" in job.directives:
        asked = re.search(r"@(\d+)$", job.directives["signal"])
        left_s = float(asked[1]) if asked else SIGNAL_S
    if own_s := job.plan.run.exit_duration_minutes * 60:
        left_s = max(left_s, job.limit_s - own_s)
    step_s = job.prediction.sec_per_it + job.evaluation_s
    need_s = step_s + job.save_s
    if not 0 < left_s < need_s:
        return
    message = f"{left_s:.0f} s before the limit are less than {need_s:.0f} s ({step_s:.0f} s of an "
    message += f"iteration, {job.save_s:.0f} s of a save, predicted): nothing is saved"
    # in half minutes
    remedy = f"--signal-s {math.ceil(max(MARGIN * need_s, SIGNAL_S) / 30) * 30}"
    if left_s < job.prediction.sec_per_it:
        yield refusal("signal", message, remedy)
    else:
        yield warning("signal", message, remedy)


def purpose(job: JobCheck) -> Findings:
    """The tokens are those of a training of that size, or the run is called a benchmark.

    No published training has fewer than one token a parameter: OPT-175B had 180e9 tokens (Zhang et
    al. 2022, arXiv:2205.01068), GPT-3 1.7 a parameter, BLOOM 2.1.
    """
    plan = job.plan
    size = job.plan.shape.parameters
    tokens = plan.samples * plan.shape.seq_length
    if job.site.is_local or tokens >= size:
        return
    what = "no published training has so few"
    if plan.run.train_iters <= BENCHMARK_ITERS:
        what = "a benchmark"
    message = f"{plan.run.train_iters:,} iterations are {tokens / size:.2g} tokens for each of "
    message += f"{size / 1e9:.3g}B parameters: {what}"
    samples = math.ceil(TOKENS_PER_PARAMETER * size / plan.shape.seq_length)
    iterations = plan.run.ramp.iterations(samples, plan.topology.gbs)
    remedy = f"a training of {TOKENS_PER_PARAMETER:g} tokens a parameter (Chinchilla) takes "
    yield warning("tokens", message, f"{remedy}train_iters={iterations:,}")
