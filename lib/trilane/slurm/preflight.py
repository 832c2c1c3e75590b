"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and
its remedy.
"""

import difflib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from trilane.config.cluster import Cluster
from trilane.config.engines import require_trainable
from trilane.config.parallelism import cluster_rules
from trilane.config.plan import Plan
from trilane.costmodel.predict import IMPOSSIBLE, Prediction, predict
from trilane.costmodel.trace import trace_of
from trilane.forecasting.failures import FailureModel, evaluation_s
from trilane.slurm import client
from trilane.slurm.script import SCRIPT, nodes_of, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.hooks import hook
from trilane.utils.validation import shipped_json
from trilane.workspace.checkpoints import checkpoint_bytes, found_in
from trilane.workspace.continuation import require_continuable
from trilane.workspace.prepared_corpora import BUILT_IN, existing_pair, unprepared
from trilane.workspace.run import Run

REFUSAL = "refusal"
WARNING = "warning"
# where many GPUs would wait for what a laptop could have found
MANY_GPUS = 32
# what is predicted may take so much longer
MARGIN = 1.5
# about this machine, where it is not the cluster
OF_MACHINE = ("data", "corpus", "container", "shared", "disk", "sbatch")
# lines of a difference that are shown
SHOWN = 20


class JobFinding(NamedTuple):
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


# of rule, message and remedy: for a refusal nothing is submitted, a warning is only shown
refusal = partial(JobFinding, REFUSAL)
warning = partial(JobFinding, WARNING)


@dataclass(frozen=True)
class JobCheck:
    """A job before its submission: a plan, the run folder, and the script that they render; "" at
    site `local`.
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

    @property
    def needed_s(self) -> float:
        """Seconds of all iterations with their evaluations; left out: that larger batches of a
        ramp-up are slower.
        """
        run = self.plan.run
        count = run.goal - run.start_iteration
        seconds = count * self.prediction.sec_per_it
        if run.eval_interval:
            each = evaluation_s(self.plan.topology, run.eval_iters, self.prediction.sec_per_it)
            seconds += count // run.eval_interval * each
        return seconds

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return -(-self.plan.topology.gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node of the job."""
        return min(self.plan.topology.gpus, self.cluster.gpus_per_node)


def nodes(job: JobCheck) -> Findings:
    """An engine can train the plan, its GPUs are the site's, and the topology obeys these nodes."""
    topology = job.plan.topology
    here = job.cluster
    planned = job.plan.cluster
    try:
        require_trainable(job.plan)
    except ValueError as error:
        # what is installed here need not be what the job's environment has
        remedy = "correct it in the job's environment, or --allow engine where that has it"
        yield refusal("engine", str(error), remedy)
    width = here.gpus_per_node
    if (here.gpu.name, width) != (planned.gpu.name, planned.gpus_per_node):
        message = f"planned for {planned.gpus_per_node} x {planned.gpu.name} a node, "
        message += f"but {job.site.name} has {width} x {here.gpu.name}"
        remedy = f"search again with --cluster {here.name}, or choose another site"
        yield refusal("cluster", message, remedy)
    for holds, field, rule in cluster_rules(topology, here):
        if not holds:
            remedy = "another topology, or fewer GPUs"
            yield refusal(field, f"{field}={getattr(topology, field)}: {rule}", remedy)


def limits(job: JobCheck) -> Findings:
    """The time and GPUs that are asked for against the QoS, and the account against the site's."""
    account = job.request.account
    ending = job.site.account_ending
    if not account.endswith(ending):
        message = f"account {account or '(none)'} does not end with {ending}"
        yield refusal("account", message, f"--account PROJECT{ending}")
    hours = job.request.time_limit_s / 3600
    gpus = (job.nodes + job.request.spares) * job.gpus_per_node
    for qos in job.site.qos:
        if qos.name != (job.request.qos or job.site.default_qos):
            continue
        if hours > qos.hours:
            remedy = f"ask for {qos.hours:g} h and chain jobs, or for another QoS"
            message = f"{hours:g} h, {qos.name} allows {qos.hours:g} h"
            yield refusal("qos time", message, remedy)
        if gpus > qos.gpus:
            message = f"{gpus} GPUs, {qos.name} allows {qos.gpus}"
            yield refusal("qos gpus", message, "another QoS or a reservation")


def memory(job: JobCheck) -> Findings:
    """The fullest stage against the card, an offload against the node's memory. Left out: the copy
    that a save is written from.
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
    has = job.cluster.host_memory_bytes / 1e9
    if offload > has:
        message = f"the offload takes {offload:.0f} GB of a node's {has:.0f} GB"
        yield refusal("host memory", message, "more nodes")


def traced(job: JobCheck) -> Findings:
    """The engine has shown memory and messages of a large plan, stage by stage."""
    gpus = job.plan.topology.gpus
    if gpus <= MANY_GPUS or job.plan.layer or trace_of(job.plan, job.run.folder / "plan.json"):
        return
    message = f"{gpus} GPUs, and the engine has not run this plan at its size"
    yield warning("trace", message, "`trilane measure plan PLAN --trace` (minutes, no GPU)")


def data(job: JobCheck) -> Findings:
    """The corpus exists where the job looks for it, and is prepared if it is large; no folder of a
    job on several nodes is on a node's own disk; compute nodes need not download a tokenizer.
    """
    # relative paths begin in the run folder of a job; here, in the current folder
    base = job.folder
    if job.site.is_local:
        base = Path()
    parts = job.plan.data.parts
    sources = [part.source for part in parts if part.source not in BUILT_IN]
    tokenizer = job.plan.data.tokenizer
    pairs = [existing_pair(str(base / part.source)) for part in parts]
    for pair in filter(None, pairs):
        try:
            hook("check_pair")(pair)
        except ValueError as error:  # before nodes find it
            yield refusal("data", str(error), "copy or prepare it again")
    tokenizers = [] if tokenizer == "bytes" or all(pairs) else [tokenizer]
    for place in (*sources, *tokenizers):
        if not (base / place).exists() and not existing_pair(str(base / place)):
            message = f"data={place}: no such file, folder or .bin/.idx pair"
            yield refusal("data", message, "name an existing one; a tokenizer is downloaded first")
    if not job.site.is_local:
        for source, size in unprepared(parts, job.folder).items():
            message = f"data.source={source}: {size / 1e9:.3g} GB of text are not prepared, "
            message += f"and {job.nodes} nodes would wait"
            remedy = "`trilane slurm script --template prepare`, and `sbatch` in the run folder"
            yield refusal("corpus", message, remedy)
    if job.nodes > 1:
        for name in (str(job.folder), job.plan.data.folder, *sources):
            path = (base / name).resolve()
            for place in filter(path.is_relative_to, job.site.local):
                message = f"{path} lies below {place}, which is local to each node"
                yield refusal("shared", message, "move it")


def storage(job: JobCheck) -> Findings:
    """The checkpoints' bytes are free, and the folder is unused, or its run can be resumed.

    Under a project quota statvfs reports the project's. Left out: quotas by user or group, which
    only the site's own tools report, and inodes.
    """
    limits = job.plan.run
    free_bytes = shutil.disk_usage(job.folder).free
    saves = 0
    if limits.save_interval:
        saves = limits.goal // limits.save_interval
    count = min(saves, limits.keep_last or saves) + 1  # and the one being written
    need = count * checkpoint_bytes(job.plan.shape)
    if need > free_bytes:
        message = f"checkpoints take up to {need / 1e9:,.1f} GB, "
        message += f"{job.folder} has {free_bytes / 1e9:,.1f} GB free"
        yield refusal("disk", message, "smaller keep_last, or delete files")
    folder = job.run.folder
    if job.run.is_completed:
        yield refusal("run folder", f"{folder} holds a completed run", "take a new run folder")
    if limits.start_iteration and not Path(limits.load).exists():
        message = f"it goes on from {limits.load}, which is not there"
        yield refusal("checkpoint", message, "write the chain again")
    # an earlier link of a chain may have no checkpoint yet
    if not limits.load or found_in(Path(limits.load)):
        try:
            require_continuable(folder, job.plan)
        except ValueError as error:
            remedy = "start from another checkpoint (run.load), or correct the plan"
            yield refusal("checkpoint", str(error), remedy)


def time(job: JobCheck) -> Findings:
    """The training ends, or saves a checkpoint, before the job's time limit; the signal before the
    limit leaves time for an iteration and a save. Left out: evaluations.
    """
    run = job.plan.run
    limit_s = job.request.time_limit_s
    signal_s = job.request.signal_s
    if job.needed_s > limit_s:
        message = f"{run.goal - run.start_iteration} iterations take {job.needed_s / 3600:.1f} h, "
        message += f"the limit is {limit_s / 3600:.1f} h"
        interval_s = run.save_interval * job.prediction.sec_per_it
        if signal_s or run.exit_duration_minutes or 0 < interval_s < limit_s:
            yield warning("time", message, "submit jobs one after another, as a chain")
        else:
            message += ", and no checkpoint is saved before"
            remedy = "save_interval, exit_duration_minutes or --signal-s"
            yield refusal("checkpoints", message, remedy)
    # by the storage that was measured on the nodes of the job, or of the plan
    risks = FailureModel().measured(job.cluster).measured(job.plan.cluster)
    save_s = risks.save_s(checkpoint_bytes(job.plan.shape), job.nodes)
    step_s = job.prediction.sec_per_it
    if job.needed_s * MARGIN > limit_s and 0 < signal_s < step_s + save_s:
        message = f"{signal_s} s before the limit are less than {step_s:.0f} s of an iteration "
        message += f"and {save_s:.0f} s of a save, predicted: nothing is saved"
        yield warning("signal", message, f"--signal-s {MARGIN * (step_s + save_s):.0f}")


def check_job(
    plan: Plan, site: Site, request: JobRequest, run: Run, allow: Collection[str] = ()
) -> list[JobFinding]:
    """Every finding about the plan in that run folder, refusals first; the rules in `allow` only
    warn.
    """
    script = ""
    try:
        if not site.is_local:
            script = render("train", plan, site, request)
    except ValueError as error:
        return [of_error(error)]
    job = JobCheck(plan, site, request, run, script)
    findings: list[JobFinding] = []
    for check in CHECKS:
        try:
            findings += check(job)
        except ValueError as error:
            findings.append(of_error(error))
    # what SLURM's commands say without a slurm.conf
    unconfigured = "establish a configuration source"
    is_configured = not any(unconfigured in finding.message for finding in findings)
    if not site.is_local and not (client.is_installed() and is_configured):
        findings = [finding for finding in findings if finding.rule not in OF_MACHINE]
        message = "this machine is not the cluster (sbatch is not installed, or not configured): "
        message += "what it has of data and disks says nothing about the cluster's"
        findings.append(warning("sbatch", message, "run the check on a login node"))
    leveled = []
    for finding in dict.fromkeys(findings):
        level = WARNING if finding.rule in allow else finding.level
        leveled.append(finding._replace(level=level))
    return sorted(leveled, key=lambda finding: finding.level != REFUSAL)


def of_error(error: ValueError) -> JobFinding:
    """A ValueError of the form "field=value: the rule" as a refusal."""
    remedy = "correct it in the plan, the request or the site's file"
    return refusal(str(error).partition("=")[0], str(error), remedy)


def refused(findings: Collection[JobFinding]) -> list[JobFinding]:
    """The refusals among them."""
    return [finding for finding in findings if finding.level == REFUSAL]


def accepted(job: JobCheck) -> Findings:
    """The container's image exists, and `sbatch --test-only` accepts the script: partition,
    constraint, account, QoS, node and GPU counts.
    """
    image = job.site.image_file
    if image and not Path(image).exists():
        remedy = "pull or build the image, or correct the site's file"
        yield refusal("container", f"container_image={image}: no such file", remedy)
    if job.site.is_local:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(job.script)
        file.flush()
        try:
            client.require_answer()
            client.test_only(Path(file.name))
        except ValueError as error:
            remedy = "sinfo lists the partitions, sacctmgr show assoc your accounts and QoS"
            yield refusal("sbatch", str(error), remedy)


def edited(job: JobCheck) -> Findings:
    """job.sbatch is what plan, site and options render, so that no other command or option hides in
    it; of one that is not, the traps are named that its text shows.
    """
    path = job.run.folder / SCRIPT
    if job.site.is_local or not path.exists() or path.read_bytes() == job.script.encode():
        return
    # lines as bash has them: a carriage return or U+2028 ends none
    script = path.read_bytes().decode("utf-8", "replace")
    both = (job.script.split("\n"), script.split("\n"))
    lines = difflib.unified_diff(*both, "rendered", SCRIPT, n=0, lineterm="")
    shown = [f"script={SCRIPT}: is not what plan, site and options render", *lines]
    remedy = "give the options it was written with, or delete it, or --allow changes"
    yield refusal("changes", "\n".join(shown[: SHOWN + 1]), remedy)
    # its text is looked at, not followed, and of endless lines only so much that it takes no time
    joined = script[: 1 << 16].replace("\\\n", " ").split("\n")
    code = [line[:4000] for line in joined if not re.match(r"\s*#(?!SBATCH)", line)]
    text = "\n".join(code)
    for rule, trap in shipped_json("script_traps").items():
        patterns = [*trap["has"], trap["lacks"]]
        *has, lacks = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
        if all(has) and not lacks:
            yield refusal(rule, trap["message"], trap["remedy"])


CHECKS = (
    nodes,
    limits,
    memory,
    traced,
    data,
    storage,
    time,
    accepted,
    edited,
)
