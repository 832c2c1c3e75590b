"""Script: a template of slurm_templates/ filled in for a plan, a site and a request, as text."""

import html
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import jinja2.meta

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster
from trilane.config.plan import Plan
from trilane.slurm.request import JobRequest, plain
from trilane.slurm.sites import Site
from trilane.utils.validation import require, require_known
from trilane.workspace.study import checkout, shipped

NAMES = ("train", "sweep", "bench", "monitor", "interactive")
SCRIPT = "job.sbatch"  # its name in a run folder
WATCH_EVERY_S = 60

# wishes that every template may leave out: they are of the script's environment or of one kind of job
QUIET = {"signal_s", "requeue", "launcher", "launch_blocking", "nccl_debug", "parallel"}
OPEN, CLOSE = "\ue000", "\ue001"  # private characters around what was filled in; no value may hold them


def render(name: str, plan: Plan, site: Site, request: JobRequest, *, array: str = "1", marked: bool = False) -> str:
    """The sbatch script of template `name`. `marked` puts OPEN and CLOSE around what the template did not say itself.

    Raises ValueError for a value that bash or sbatch would read as something else, a wish for which the template has
    no place, a partition or QoS that the site does not know, and GPUs that do not fill their nodes.
    """
    require_known("template", name, NAMES)
    environment = _environment(marked)
    text = f"{name}.sbatch"
    wanted = _blanks(environment, text)
    values = blanks(name, plan, site, request, array)
    for wish in request.given():
        has_place = wish in wanted or wish in QUIET or wish in ("environment", "time_limit")
        require(has_place, wish, getattr(request, wish), f"template {name} has no place for it")
    return environment.get_template(text).render({blank: values[blank] for blank in wanted})


def blanks(name: str, plan: Plan, site: Site, request: JobRequest, array: str = "1") -> dict[str, Any]:
    """Every value that a template may name."""
    cluster = nodes_of(plan, site)
    nodes, used = node_count(plan, cluster)
    gpus = plan.topology.gpus
    if site.partitions and request.partition:
        require_known("partition", request.partition, site.partitions)
    site.limits(request.qos)
    is_watcher, is_bench = name == "monitor", name == "bench"
    return {
        "job_name": plain("label", plan.label),
        "nodes": 1 if is_watcher else nodes,
        "tasks_per_node": used if is_bench else 1,
        "processes_per_node": used,
        "gpus_per_node": 0 if is_watcher or cluster.gpu.kind == "cpu" else used,
        "cores_per_task": _cores(cluster, used, is_bench, is_watcher),
        "threads": max(1, cluster.cores_per_node // used),
        "hint": "" if is_watcher else site.hint,
        "time_limit": request.time_limit,
        "account": request.account,
        "partition": request.partition or (site.service_partition if is_watcher else site.partition),
        "constraint": "" if is_watcher else request.constraint or site.constraint,
        "qos": "" if is_watcher else request.qos,
        "reservation": request.reservation,
        "exclude": request.exclude,
        "mail": request.mail,
        "signal_s": request.signal_s,
        "requeue": "requeue" if request.requeue else "no-requeue",
        "launcher": request.launcher,
        "launch_blocking": request.launch_blocking,
        "nccl_debug": request.nccl_debug,
        "offline": site.offline,
        "modules": " ".join(plain("module", module) for module in site.modules),
        "conda": request.environment.removeprefix("conda:") if request.environment.startswith("conda:") else "",
        "venv": quoted("environment", request.environment or _own_environment()),
        "summary": f"{plan.shape.parameters / 1e9:.3g}B, {plan.topology.label}, {gpus} GPUs, engine {plan.engine}",
        "array": array,
        "parallel": request.parallel,
        "every_s": WATCH_EVERY_S,
        "watch_s": max(WATCH_EVERY_S, request.time_limit_s - 120),
    }


def nodes_of(plan: Plan, site: Site) -> Cluster:
    """The cluster whose nodes the job gets: the site's, or the plan's own where the site names none."""
    return hardware.cluster(site.cluster) if site.cluster else plan.cluster


def node_count(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Nodes of the job and GPUs used on each; ValueError where they do not fill whole nodes."""
    gpus, per_node = plan.topology.gpus, cluster.gpus_per_node
    nodes, used = -(-gpus // per_node), min(gpus, per_node)
    require(gpus == nodes * used, "tp x pp x dp", gpus, f"must fill whole nodes of {per_node} GPUs")
    return nodes, used


def quoted(field: str, text: str) -> str:
    """`text` as one word of bash, whatever it holds; ValueError where it does not stay on its line."""
    require(text.isprintable() and OPEN not in text, field, repr(text), "must stay on one line")
    return shlex.quote(text)


def as_html(marked: str) -> str:
    """A marked script as HTML: what was filled in stands on yellow."""
    text = html.escape(marked).replace(OPEN, '<mark style="background:#ffe9a8">').replace(CLOSE, "</mark>")
    return f'<pre style="line-height:1.35">{text}</pre>'


def folded(texts: Mapping[str, str]) -> str:
    """Files as HTML, each behind its name."""
    shown = ((html.escape(name), html.escape(text)) for name, text in texts.items())
    return "".join(f"<details><summary>{name}</summary><pre>{text}</pre></details>" for name, text in shown)


def _own_environment() -> str:
    root = checkout()
    return str(root / ".venv") if root else sys.prefix


def _cores(cluster: Cluster, used: int, is_bench: bool, is_watcher: bool) -> int:
    if is_watcher:
        return 1
    # Jean Zay bills and binds by cores: a part of a node's GPUs gets the same part of its cores
    share = max(1, cluster.cores_per_node * used // cluster.gpus_per_node)
    return max(1, share // used) if is_bench else share


def _environment(marked: bool) -> jinja2.Environment:
    # {# would open a Jinja comment and swallow bash's ${#array[@]}
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("slurm_templates")),
        undefined=jinja2.StrictUndefined,
        comment_start_string="<#",
        comment_end_string="#>",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=(lambda value: f"{OPEN}{value}{CLOSE}") if marked else None,
    )


def _blanks(environment: jinja2.Environment, name: str) -> set[str]:
    """The blanks of a template and of what it includes."""
    assert environment.loader is not None
    parsed = environment.parse(environment.loader.get_source(environment, name)[0])
    found = set(jinja2.meta.find_undeclared_variables(parsed))
    for part in jinja2.meta.find_referenced_templates(parsed):
        found |= _blanks(environment, str(part))
    return found
