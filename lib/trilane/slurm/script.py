"""Job scripts: a template of slurm_templates/ rendered for a plan, a site and a request; #SBATCH lines read back."""

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2.meta

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster
from trilane.config.plan import Plan, read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.megatron_args import ENGINE_OF, megatron_args, megatron_text
from trilane.slurm.site_options import directives_of, image_file, plain, srun_arguments
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.tables import Html
from trilane.utils.validation import require, require_known
from trilane.workspace.installation import checkout, shipped
from trilane.workspace.run_folder import write_text

NAMES = ("train", "sweep", "bench", "monitor", "prepare", "interactive")
SCRIPT = "job.sbatch"  # the file name in a run folder
WATCH_EVERY_S = 60

# options that a template may ignore: they concern the environment or one kind of job
OPTIONAL = {"signal_s", "requeue", "launcher", "launch_blocking", "nccl_debug", "parallel", "preflight"}
OPEN, CLOSE = "\ue000", "\ue001"  # private-use characters around filled-in values; no value may contain them

# sbatch's one-letter options that take a value
SHORT = {
    **{"A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "n": "ntasks", "p": "partition", "q": "qos"},
    **{"t": "time", "w": "nodelist", "x": "exclude", "o": "output", "e": "error", "a": "array", "c": "cpus-per-task"},
    **{"d": "dependency", "G": "gpus", "D": "chdir", "b": "begin", "L": "licenses", "M": "clusters"},
}


def render(name: str, plan: Plan, site: Site, request: JobRequest, *, array: str = "1", marked: bool = False) -> str:
    """The sbatch script of template `name`; `marked` puts OPEN and CLOSE around each filled-in value.

    Raises ValueError for a value that bash or sbatch would interpret, an option that the template does not use, a
    partition or QoS that the site does not have, and GPUs that do not fill their nodes.
    """
    require_known("template", name, NAMES)
    environment = _environment(marked)
    text = f"{name}.sbatch"
    wanted = _blanks(environment, text)
    values = blanks(name, plan, site, request, array)
    for option in request.given():
        is_used = option in wanted or option in OPTIONAL or option in ("environment", "time_limit")
        require(is_used, option, getattr(request, option), f"template {name} does not use it")
    return environment.get_template(text).render({blank: values[blank] for blank in wanted})


def files(plan: Plan, site: Site, request: JobRequest, beside: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A run folder's files by name: plan.json, job.sbatch, and ds_config.json or megatron_args.txt where it has one.

    `beside` is what plan.json has beside the plan's own fields: its prediction, and the constants that made it.
    """
    values = {**plan.to_json(), **(beside or {})}
    texts = {"plan.json": json.dumps(values, indent=1), SCRIPT: render("train", plan, site, request)}
    if plan.engine.startswith("deepspeed"):
        texts["ds_config.json"] = json.dumps(deepspeed_config(plan, compiler=True), indent=1)
    for flavour in [name for name, engine in ENGINE_OF.items() if engine == plan.engine]:
        with contextlib.suppress(ValueError):
            texts["megatron_args.txt"] = megatron_text(megatron_args(plan, flavour)) + "\n"
    return texts


def rewrite(folder: Path, site: Site, request: JobRequest) -> None:
    """Write job.sbatch from its template; the one before, edited or not, is kept in earlier/."""
    write_text(folder / SCRIPT, render("train", read_plan(folder / "plan.json"), site, request))


def own_environment() -> str:
    """The Python environment of a job where none is asked for: the checkout's .venv, or that of the installed wheel."""
    root = checkout()
    return str(root / ".venv") if root else sys.prefix


def blanks(name: str, plan: Plan, site: Site, request: JobRequest, array: str = "1") -> dict[str, Any]:
    """Every value that a template may use, by name."""
    cluster = nodes_of(plan, site)
    nodes, used = node_count(plan, cluster)
    gpus = plan.topology.gpus
    if site.partitions and request.partition:
        require_known("partition", request.partition, site.partitions)
    require_spares(request.spares, nodes, cluster)
    is_watcher, is_bench = name in ("monitor", "prepare"), name == "bench"
    one_each = is_bench or (request.launcher == "srun" and name in ("train", "sweep"))  # one task for each GPU
    tested = 0 if cluster.gpu.kind == "cpu" else used
    # a site's service partition has neither the nodes nor the QoS of the training
    asked = JobRequest() if name == "monitor" or (is_watcher and site.service_partition) else request
    options = asdict(request)
    environment = options.pop("environment")
    return options | {
        "job_name": plain("label", plan.label),
        "nodes": 1 if is_watcher else nodes + request.spares,
        "train_nodes": nodes,
        "preflight": request.preflight and nodes + request.spares > 1,
        "node_test": f"--test --gpus {tested} -- {srun_arguments(site, request.launcher)}".strip(),
        "tasks_per_node": used if one_each else 1,
        "processes_per_node": used,
        "gpus_per_node": "" if is_watcher or cluster.gpu.kind == "cpu" else f"{site.gpu_type}:{used}".lstrip(":"),
        "cores_per_task": _cores(cluster, used, one_each, is_watcher),
        "threads": _cores(cluster, used, one_each=True, is_watcher=False),
        "hint": "" if is_watcher else site.hint,
        "partition": request.partition or (site.service_partition if is_watcher else site.partition),
        "constraint": asked.constraint or ("" if is_watcher else site.nodes_wanted),
        "qos": asked.qos,
        **_site_blanks(site, request, is_watcher),
        "requeue": "requeue" if request.requeue else "no-requeue",
        "offline": site.offline,
        "conda": environment.removeprefix("conda:") if environment.startswith("conda:") else "",
        "venv": quoted("environment", environment or own_environment()),
        "summary": f"{plan.shape.parameters / 1e9:.3g}B, {plan.topology.label}, {gpus} GPUs, engine {plan.engine}",
        "array": array,
        "every_s": WATCH_EVERY_S,
        "watch_s": max(WATCH_EVERY_S, request.time_limit_s - 120),
    }


def _site_blanks(site: Site, request: JobRequest, is_watcher: bool) -> dict[str, Any]:
    """What a site adds in its own words; one that only monitors or prepares takes a core."""
    return {
        "modules": " ".join(site.modules),
        "site_env": {name: quoted(f"site.env.{name}", value) for name, value in site.env.items()},
        "setup": [quoted(f"site.setup, line {n}", line) for n, line in enumerate(site.setup, 1)],
        "site_name": quoted("site.name", site.name),
        "image": quoted("site.container_image", image_file(site)) if image_file(site) and not is_watcher else "",
        "sbatch": [] if is_watcher else directives_of(site),
        "mem": "" if is_watcher else site.mem,
        "exclusive": site.exclusive and not is_watcher,
        "switches": "" if is_watcher else site.switches,
        "segment": 0 if is_watcher else site.segment,
        "gpu_option": site.gpu_option,
        "host_suffix": site.host_suffix,
        "stage_env": site.stage_env,
        "stage_folder": re.sub(r"\$\{?(\w+)\}?", r"${\1:-}", site.stage_env),
        "srun_args": srun_arguments(site, request.launcher),
    }


def nodes_of(plan: Plan, site: Site) -> Cluster:
    """The cluster whose nodes the job gets: the site's, else the plan's own."""
    return hardware.cluster(site.cluster) if site.cluster else plan.cluster


def node_count(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Nodes of the job and GPUs used on each; ValueError where the GPUs do not fill whole nodes."""
    gpus, per_node = plan.topology.gpus, cluster.gpus_per_node
    nodes, used = -(-gpus // per_node), min(gpus, per_node)
    require(gpus == nodes * used, "tp x pp x dp", gpus, f"must fill whole nodes of {per_node} GPUs")
    return nodes, used


def require_spares(spares: int, nodes: int, cluster: Cluster) -> None:
    """ValueError for more spare nodes than the cluster has left, or than nodes that train."""
    left = cluster.max_nodes - nodes
    has = f"{cluster.name} has {cluster.max_nodes} nodes, of which the plan trains on {nodes}"
    require(spares <= max(0, left), "spares", spares, f"must be at most {max(0, left)}: {has}")
    require(spares <= nodes, "spares", spares, f"must be at most the nodes that train ({nodes})")


def quoted(field: str, text: str) -> str:
    """`text` quoted as one word of bash; ValueError unless it is printable, on one line."""
    require(text.isprintable() and OPEN not in text, field, repr(text), "must stay on one line")
    return shlex.quote(text)


def as_html(marked: str) -> Html:
    """A marked script as HTML, with the filled-in values on yellow."""
    return Html(Html.pre(marked).replace(OPEN, "<mark>").replace(CLOSE, "</mark>"))


def folded(texts: Mapping[str, str]) -> Html:
    """Files as HTML, each folded under its name."""
    template = "<details><summary>{}</summary><pre>{}</pre></details>"
    return Html.joined("", [Html.of(template, name, text) for name, text in texts.items()])


def _cores(cluster: Cluster, used: int, one_each: bool, is_watcher: bool) -> int:
    if is_watcher:
        return 1
    # Jean Zay bills and binds by cores: a share of a node's GPUs gets the same share of its cores
    share = max(1, cluster.cores_per_node * used // cluster.gpus_per_node)
    return max(1, share // used) if one_each else share


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
        finalize=(lambda value: f"{OPEN}{value}{CLOSE}" if value != "" else "") if marked else None,
    )


def _blanks(environment: jinja2.Environment, name: str) -> set[str]:
    """The blanks of a template and of the parts that it includes."""
    assert environment.loader is not None
    parsed = environment.parse(environment.loader.get_source(environment, name)[0])
    found = set(jinja2.meta.find_undeclared_variables(parsed))
    for part in jinja2.meta.find_referenced_templates(parsed):
        found |= _blanks(environment, str(part))
    return found


def directives(script: str) -> dict[str, str]:
    """The #SBATCH options of a script by their long names, "" for one without a value; of duplicates the last.

    As sbatch does, it reads up to the first line that is not a comment. Raises ValueError for an unclosed quote. Left
    out: abbreviated long names, which sbatch accepts where they are unique.
    """
    found: dict[str, str] = {}
    comments = takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), script.splitlines())
    for line in [line.removeprefix("#SBATCH") for line in comments if re.match(r"#SBATCH\s", line)]:
        words = _words(line)
        while words:
            name, value = _option(words.pop(0))
            if name and value is None:
                # `--time 20:00:00`: a word after an option is its value, as sbatch allows no other word there
                value = words.pop(0) if words and not words[0].startswith("-") else ""
            if name:
                found[name] = value or ""
    return found


def gres_gpus(gres: str) -> int:
    """The number of GPUs in a --gres value: 8 in "gpu:8", "gpu:a100:8" or "gpu:a100:8,nvme:1", 1 in "gpu"."""
    parts = [part for part in gres.split(",") if part.split(":")[0] == "gpu"]
    counts = [re.search(r":(\d+)$", part) for part in parts]
    return sum(int(count[1]) if count else 1 for count in counts)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"script=#SBATCH{line}: cannot be read: {error}") from None


def _option(word: str) -> tuple[str, str | None]:
    """Name and value of an option; the value is None where it may be the next word, the name "" for no option."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name, value if equals else None
    if re.match(r"-[A-Za-z]", word):
        return SHORT.get(word[1], word[1]), word[2:] or None
    return "", None
