"""Pre-flight checks of resources: nodes and memory of the plan, and the folders and free space of the run."""

import math
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from trilane.config import cluster
from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import CLUSTER_RULES
from trilane.costmodel.predict import IMPOSSIBLE
from trilane.planning.space import divisors
from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.sites import seconds_of
from trilane.utils.validation import require_known
from trilane.workspace.checkpoints import FOLDER, checkpoint_bytes, found_in, latest
from trilane.workspace.continuation import require_continuable
from trilane.workspace.prepared_corpora import BUILT_IN, unprepared
from trilane.workspace.run_folder import is_completed, is_started

VOLTA, AMPERE = (7, 0), (8, 0)


def nodes(case: JobCheck) -> Iterator[JobFinding]:
    """The plan's GPUs are the site's, and the topology obeys these nodes (parallelism.CLUSTER_RULES)."""
    plan, node, t = case.plan, case.cluster.gpus_per_node, case.plan.topology
    if reason := untrainable_reason(t):
        yield refuse("engine", reason, "train it with the program that can (trilane convert megatron)")
    if case.cluster.gpu.name != plan.cluster.gpu.name or node != plan.cluster.gpus_per_node:
        planned = f"planned for {plan.cluster.gpus_per_node} x {plan.cluster.gpu.name} a node"
        remedy = f"search again with --cluster {case.cluster.name}, or choose the site of {plan.cluster.name}"
        yield refuse("cluster", f"{planned}, but {case.site.name} has {node} x {case.cluster.gpu.name}", remedy)
    choices = f"choose tp among {', '.join(map(str, divisors(node)))}"
    remedies = {"gpus": ("nodes", "use fewer GPUs"), "tp": ("tp", choices)}
    for rule in CLUSTER_RULES:
        if not rule.holds(t, case.cluster):
            name, remedy = remedies[rule.field]
            yield refuse(name, rule.message(t, case.cluster), remedy)


def precision(case: JobCheck) -> Iterator[JobFinding]:
    """bf16 needs compute capability 8.0; torch's is_bf16_supported() is True on a V100, which only emulates it."""
    gpu = case.cluster.gpu
    if case.plan.topology.precision == "bf16" and gpu.kind == "cuda" and gpu.compute_capability < AMPERE:
        yield refuse("precision", f"{gpu.name} has no bf16", "use fp16 with a loss scale, or an A100 and later")


def wheel(case: JobCheck) -> Iterator[JobFinding]:
    """Whether the installed torch holds kernels for the card; torch's version.py is read, torch is not imported.

    From 2.11 on only the CUDA 12.6 builds hold sm_70, and CUDA 13 no longer has it.
    """
    gpu, path = case.cluster.gpu, torch_version_file(case.request.environment)
    if gpu.kind != "cuda":
        return
    if case.site.container:
        yield warn("wheel", "torch is the container's, which was not looked into", "import torch in it on a login node")
        return
    if path is None:
        yield warn("wheel", "torch was not found in the job's environment from here", "check it on a login node")
        return
    version, cuda = torch_build(path.read_text(encoding="utf-8"))
    build = f"torch {version} is built for {'CUDA ' + cuda if cuda else 'no CUDA'}"
    if not cuda:
        yield refuse("wheel", f"{build}, the nodes have {gpu.name}", "install the wheel of the card's CUDA")
    elif gpu.compute_capability == VOLTA and cuda != "12.6":
        remedy = "install from https://download.pytorch.org/whl/cu126 (environment.yml, the V100 variant)"
        certain = _numbers(version) >= (2, 11) or _numbers(cuda) >= (13, 0)
        message = f"{build}: {'no' if certain else 'perhaps no'} kernels for {gpu.name} (sm_70)"
        yield (refuse if certain else warn)("wheel", message, remedy)


def torch_version_file(environment: str) -> Path | None:
    """torch/version.py of a venv, or of this Python where `environment` is empty; None where it is not found."""
    if environment.startswith("conda:"):
        return None
    if environment:
        return next(Path(environment).glob("lib/python3*/site-packages/torch/version.py"), None)
    found = find_spec("torch")
    return Path(found.origin).with_name("version.py") if found and found.origin else None


def torch_build(text: str) -> tuple[str, str]:
    """torch's version and its CUDA ("" for none) from version.py."""
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.M)
    return version[1] if version else "?", cuda[1] if cuda else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def limits(case: JobCheck) -> Iterator[JobFinding]:
    """The script's time and GPUs against its QoS, and its account against the site's."""
    site, gpus, asked = case.site, (case.nodes + case.spares) * case.gpus_per_node, case.directives
    if site.qos and (name := asked.get("qos", "")) not in ("", *(q.name for q in site.qos)):
        try:
            require_known("qos", name, [q.name for q in site.qos])
        except ValueError as error:
            message = f"{error}; its longest job and most GPUs are unknown here, so they were not checked"
            yield warn("qos", message, f"sacctmgr show qos {name}, and add it to the site's file")
    qos, seconds = site.limits(asked.get("qos", "")), seconds_of(asked.get("time", "00:10:00"))
    if qos and seconds > qos.hours * 3600:
        fits = [q.name for q in site.qos if seconds <= q.hours * 3600 and gpus <= q.gpus]
        remedy = f"ask for {qos.hours:g} h and chain jobs" + (f", or --qos {fits[0]}" if fits else "")
        limit = "no time limit" if seconds == math.inf else f"{seconds / 3600:g} h"
        yield refuse("qos time", f"{limit}, {qos.name} allows {qos.hours:g} h", remedy)
    if qos and gpus > qos.gpus:
        yield refuse("qos gpus", f"{gpus} GPUs, {qos.name} allows {qos.gpus}", "another QoS or a reservation")
    account = asked.get("account", "")
    if site.account_ending and not account.endswith(site.account_ending):
        message = f"account {account or '(none)'} does not end with {site.account_ending}"
        yield refuse("account", message, f"--account PROJECT{site.account_ending}")


def memory(case: JobCheck) -> Iterator[JobFinding]:
    """The fullest stage against the card; an offload, and the copy that a save is written from, against the node's
    memory. The copy is there from the start of a run that saves.
    """
    p, used = case.prediction, min(case.plan.topology.gpus, case.cluster.gpus_per_node)
    card, risk = case.cluster.gpu.memory_bytes, p.oom_probability
    message = f"predicted {p.memory_bytes / 2**30:.1f} of {card / 2**30:.1f} GiB, probability of running out {risk:.0%}"
    remedy = "smaller mbs, recompute full, more tp or pp, a higher ZeRO stage"
    if risk > IMPOSSIBLE:
        yield refuse("memory", message, remedy)
    elif p.is_risky:
        yield warn("memory", message, remedy)
    host, has = p.host_memory_bytes * used / 1e9, case.cluster.host_memory_bytes / 1e9
    run, share = case.plan.run, used / case.plan.topology.gpus
    copy = share * checkpoint_bytes(case.plan.shape) / 1e9 * run.saves_at_end
    if host > has:
        message = f"the offload takes {host:.0f} GB of a node's {has:.0f} GB"
        yield refuse("host memory", message, "more replicas, or no offload")
    elif host + copy > has:
        message = f"a save's copy, with the offload, takes {host + copy:.0f} GB of a node's {has:.0f} GB"
        yield refuse("host memory", message, "more nodes, or no offload")


def size(case: JobCheck) -> float:
    """The most bytes of the run's checkpoints: those that are kept, and the one being written."""
    run = case.plan.run
    saves = run.goal // run.save_interval if run.save_interval else 0
    kept = min(saves, run.keep_last or saves)
    return (kept + 1) * checkpoint_bytes(case.plan.shape)


def known(case: JobCheck) -> Iterator[JobFinding]:
    """The site names a cluster, without which its nodes cannot be checked."""
    if not case.site.cluster and not case.site.is_local and case.plan.cluster.name not in cluster.catalogue():
        message = f"site {case.site.name} names no cluster: its nodes are assumed to be those of the plan"
        yield warn("site", message, "copy data/sites/generic.json and fill it in")


def data(case: JobCheck) -> Iterator[JobFinding]:
    """The corpus exists, where the job looks for it."""
    for source in (part.source for part in case.plan.data.parts):
        places = (case.base / (source + ending) for ending in ("", ".idx", ".bin"))
        if source not in BUILT_IN and not any(place.exists() for place in places):
            yield refuse(
                "data", f"data.source={source}: no such file, folder or .bin/.idx pair", "name an existing one"
            )


def corpus(case: JobCheck) -> Iterator[JobFinding]:
    """A large corpus is prepared: otherwise one process would tokenize it while all nodes wait."""
    if case.site.is_local:
        return
    for source, size in unprepared(case.plan.data.parts, case.folder.resolve()).items():
        message = (
            f"data.source={source}: {size / 1e9:.3g} GB of text are not prepared, and {case.nodes} nodes would wait"
        )
        yield refuse("corpus", message, "`trilane slurm prepare` on the run, or `trilane slurm submit --prepare`")


def shared(case: JobCheck) -> Iterator[JobFinding]:
    """The files that all nodes read or write are on a file system that all of them share."""
    data, here = case.plan.data, case.base
    paths = [("run folder", case.folder.resolve()), ("data.folder", (here / data.folder).resolve())]
    paths += [("data.source", (here / p.source).resolve()) for p in data.parts if p.source not in BUILT_IN]
    for name, path in paths:
        own = next((place for place in case.site.local if path.is_relative_to(place)), None)
        if own and case.nodes > 1:
            yield refuse("shared", f"{name} {path} lies below {own}, which is local to each node", "move it")
        elif own and not case.site.is_local:
            yield warn("shared", f"{name} {path} lies below {own}, which may differ on the compute node", "move it")


def space(case: JobCheck) -> Iterator[JobFinding]:
    """The checkpoints' bytes and inodes are free; under a project quota statvfs reports the project's.

    Left out: quotas by user or group, which only the site's own tools report.
    """
    place = next(p for p in (case.folder.resolve(), *case.folder.resolve().parents) if p.exists())
    need, (free, inodes) = size(case), available(place)
    message = f"checkpoints take up to {need / 1e9:,.1f} GB, {place} has {free / 1e9:,.1f} GB free"
    if need > free:
        yield refuse("disk", message, "smaller keep_last, larger save_interval, or another file system")
    elif need > free / 2:
        yield warn("disk", message, "smaller keep_last, or delete files")
    ranks, run = case.plan.topology.gpus, case.plan.run
    kept = 1 + (min(run.keep_last or 10**9, run.goal // run.save_interval) if run.save_interval else 0)
    files = kept * (2 * ranks + 3)
    if files > inodes:
        message = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes free"
        yield refuse("inodes", message, "delete files, or a smaller keep_last")


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of a file system; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def free(case: JobCheck) -> Iterator[JobFinding]:
    """The run folder is unused, or its run can be resumed."""
    folder = case.folder
    if is_completed(folder):
        yield refuse("run folder", f"{folder} holds a completed run", "take a new run folder")
    elif is_started(folder) and latest(folder / FOLDER) is None:
        message = (
            f"{folder} holds a run without a checkpoint: its files go to attempts/, and it starts from iteration 0"
        )
        yield warn("run folder", message, "take a new run folder to keep both")


def loaded(case: JobCheck) -> Iterator[JobFinding]:
    """The checkpoint that the run starts from is one of its model; an earlier link of a chain may have none yet."""
    try:
        if not case.plan.run.load or found_in(Path(case.plan.run.load)):
            require_continuable(case.folder, case.plan)
    except ValueError as error:
        yield refuse("checkpoint", str(error), "start from another checkpoint (run.load), or correct the plan")


RULES: tuple[Rule, ...] = (
    nodes,
    precision,
    wheel,
    limits,
    memory,
    known,
    data,
    corpus,
    shared,
    space,
    free,
    loaded,
)
