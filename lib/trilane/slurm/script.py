"""Job scripts: a template of slurm_templates/ rendered for a plan, a site and a request; #SBATCH
lines read back.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2.meta

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster
from trilane.config.plan import Plan, read_plan
from trilane.slurm.sites import JobRequest, Site, require_form
from trilane.utils.validation import require, require_known
from trilane.workspace.installation import checkout, shipped
from trilane.workspace.run_folder import write_text

NAMES = ("train", "bench", "prepare", "interactive")
# the file name in a run folder
SCRIPT = "job.sbatch"


def render(name: str, plan: Plan, site: Site, request: JobRequest) -> str:
    """The sbatch script of template `name`.

    Raises ValueError for a value that bash or sbatch would interpret, an option that the template
    does not use or sets itself, a partition that the site does not have, and GPUs that do not fill
    their nodes.
    """
    require_known("template", name, NAMES)
    text, wanted = _filled(name, blanks(name, plan, site, request))
    # a template may ignore those that concern the environment, the time or the training alone
    ignored = {"signal_s", "requeue", "launcher", "launch_blocking", "nccl_debug", "preflight"}
    for option in {*request.given()} - ignored - {"environment", "time_limit"}:
        require(
            option in wanted, option, getattr(request, option), f"template {name} does not use it"
        )
    if site.sbatch or site.srun or site.env:
        own, _ = _filled(
            name, blanks(name, plan, replace(site, sbatch={}, srun=(), env={}), request)
        )
        _require_once(own, site)
    return text


def _require_once(own: str, site: Site) -> None:
    """ValueError where the site sets what the script itself sets: the last would count."""
    # SLURM lets an option be abbreviated; its own binding a site may replace
    options, variables = (
        re.findall(r"--(?!cpu-bind)([a-z][a-z-]+)", own),
        re.findall(r"\b([A-Z_]+)=", own),
    )
    for field, word in [("sbatch", f"--{name}") for name in site.sbatch] + [
        ("srun", word) for word in site.srun
    ]:
        known = [one for one in options if one.startswith(word[2:].partition("=")[0])]
        rule = f"the script sets --{known[0] if known else ''} itself; use the site's or the job's own field"
        require(not known, f"site.{field}", word, rule)
    for name in site.env:
        require(name not in variables, "site.env", name, "is set by the script itself")


def files(
    plan: Plan, site: Site, request: JobRequest, beside: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """A run folder's files by name: plan.json and job.sbatch.

    `beside` is what plan.json has beside the plan's own fields: its prediction, and the constants
    that made it.
    """
    values = {**plan.to_json(), **(beside or {})}
    return {"plan.json": json.dumps(values, indent=1), SCRIPT: render("train", plan, site, request)}


def write(
    folder: Path,
    plan: Plan,
    site: Site,
    request: JobRequest,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Write a run folder with its files()."""
    for name, text in files(plan, site, request, beside).items():
        write_text(folder / name, text)


def rewrite(folder: Path, site: Site, request: JobRequest) -> None:
    """Write job.sbatch from its template; the one before, edited or not, is kept in earlier/."""
    write_text(folder / SCRIPT, render("train", read_plan(folder / "plan.json"), site, request))


def blanks(name: str, plan: Plan, site: Site, request: JobRequest) -> dict[str, Any]:
    """Every value that a template may use, by name."""
    cluster = nodes_of(plan, site)
    nodes, used = node_count(plan, cluster)
    if site.partitions and request.partition:
        require_known("partition", request.partition, site.partitions)
    require_spares(request.spares, nodes, cluster)
    require_form("word", "label", plan.label)
    one_each = name == "bench" or (
        request.launcher == "srun" and name == "train"
    )  # a task for each GPU
    # Jean Zay bills and binds by cores: a share of a node's GPUs gets the same share of its cores
    cores = max(1, cluster.cores_per_node * used // cluster.gpus_per_node)
    each, is_cpu, srun = (
        max(1, cores // used),
        cluster.gpu.kind == "cpu",
        srun_arguments(site, request.launcher),
    )
    root, environment = checkout(), request.environment
    own = str(root / ".venv") if root else sys.prefix
    values = vars(site) | vars(request)
    values |= {
        "job_name": plan.label,
        "nodes": nodes + request.spares,
        "train_nodes": nodes,
        "preflight": request.preflight and nodes + request.spares > 1,
        "node_test": f"--test --gpus {0 if is_cpu else used} -- {srun}".strip(),
        # of ft_launcher: a minute after our own watchdog, which dumps stacks first
        "first_beat_s": 5 * plan.run.hang_timeout_s + 720 if plan.run.hang_timeout_s else 86400,
        "next_beat_s": plan.run.hang_timeout_s + 120 if plan.run.hang_timeout_s else 86400,
        "tasks_per_node": used if one_each else 1,
        "processes_per_node": used,
        "gpus_per_node": "" if is_cpu else f"{site.gpu_type}:{used}".lstrip(":"),
        "cores_per_task": each if one_each else cores,
        "threads": each,
        "partition": request.partition or site.partition,
        "constraint": request.constraint or site.constraint,
        "modules": " ".join(site.modules),
        "site_env": {name: quoted(f"site.env.{name}", value) for name, value in site.env.items()},
        "setup": [quoted(f"site.setup, line {n}", line) for n, line in enumerate(site.setup, 1)],
        "site_name": quoted("site.name", site.name),
        "image": quoted("site.container_image", site.image_file) if site.image_file else "",
        "sbatch": [
            f"{option}={value}" if value else option for option, value in site.sbatch.items()
        ],
        "stage_folder": re.sub(r"\$\{?(\w+)\}?", r"${\1:-}", site.stage_env),
        "srun_args": srun,
        "requeue": "requeue" if request.requeue else "no-requeue",
        "conda": environment.removeprefix("conda:") if environment.startswith("conda:") else "",
        "venv": quoted("environment", environment or own),
        "summary": f"{plan.shape.parameters / 1e9:.3g}B, {plan.topology.label}, {plan.topology.gpus} GPUs, "
        f"engine {plan.engine}",
    }
    if name == "prepare":  # a core, where the site has one for nothing
        for left in ("image", "sbatch", "gpus_per_node"):
            values[left] = ""
        # a service partition has neither the nodes nor the QoS of the training
        asked = JobRequest() if site.service_partition else request
        values |= {"partition": request.partition or site.service_partition, "qos": asked.qos}
        values |= {
            "constraint": asked.constraint,
            "nodes": 1,
            "tasks_per_node": 1,
            "cores_per_task": 1,
        }
    return values


def srun_arguments(site: Site, launcher: str) -> str:
    """What the scripts give srun beyond their own options, each quoted for bash and followed by a
    blank; "" for none.

    With Apptainer the string ends in its command, so that what follows runs inside the image.
    """
    words = [shlex.quote(word) for word in site.srun]
    # one task for each GPU is bound to its own cores, and so to the NUMA node that they are on
    if launcher == "srun" and not any(
        word.startswith(("--cpu-bind", "--cpu_bind")) for word in site.srun
    ):
        words.append("--cpu-bind=cores")
    image, mounts = shlex.quote(site.container_image), site.container_mounts
    if site.container == "pyxis":
        every = "".join(f",{shlex.quote(m if ':' in m else f'{m}:{m}')}" for m in mounts)
        # the frozen code, which may lie in another folder
        code = '${TRILANE_CODE:+",$TRILANE_CODE:$TRILANE_CODE"}'
        own = f'--container-mounts="$PWD:$PWD"{code}{every}'
        words += [f"--container-image={image}", own, '--container-workdir="$PWD"']
    elif site.container:
        own = '--bind "$PWD" --pwd "$PWD" ${TRILANE_CODE:+--bind "$TRILANE_CODE"}'
        words += [
            site.container,
            "exec --nv",
            own,
            *(f"--bind {shlex.quote(m)}" for m in mounts),
            image,
        ]
    return "".join(f"{word} " for word in words)


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
    left = max(0, cluster.max_nodes - nodes)
    has = f"{cluster.name} has {cluster.max_nodes} nodes, of which the plan trains on {nodes}"
    require(spares <= left, "spares", spares, f"must be at most {left}: {has}")
    require(spares <= nodes, "spares", spares, f"must be at most the nodes that train ({nodes})")


def quoted(field: str, text: str) -> str:
    """`text` quoted as one word of bash; ValueError unless it is printable, on one line."""
    require(text.isprintable(), field, repr(text), "must stay on one line")
    return shlex.quote(text)


def _filled(name: str, values: Mapping[str, Any]) -> tuple[str, set[str]]:
    """The template with these values, and the names that it, or a part that it includes, uses."""
    # {# would open a Jinja comment and swallow bash's ${#array[@]}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("slurm_templates")),
        undefined=jinja2.StrictUndefined,
        comment_start_string="<#",
        comment_end_string="#>",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    used, parts = set[str](), [f"{name}.sbatch"]
    for part in parts:
        parsed = environment.parse((shipped("slurm_templates") / part).read_text(encoding="utf-8"))
        used |= jinja2.meta.find_undeclared_variables(parsed)
        parts += map(str, jinja2.meta.find_referenced_templates(parsed))
    return environment.get_template(parts[0]).render({blank: values[blank] for blank in used}), used


def directives(script: str) -> dict[str, str]:
    """The #SBATCH options of a script by their long names, "" for one without a value; of
    duplicates the last.

    As sbatch does, it reads up to the first line that is not a comment. Raises ValueError for an
    unclosed quote. Left out: abbreviated long names, which sbatch accepts where they are unique.
    """
    names = "account constraint job-name nodes ntasks partition qos time nodelist exclude output error array"
    long = dict(
        zip(
            "ACJNnpqtwxoeacdGD", f"{names} cpus-per-task dependency gpus chdir".split(), strict=True
        )
    )
    found: dict[str, str] = {}
    comments = takewhile(
        lambda line: not line.strip() or line.lstrip().startswith("#"), script.splitlines()
    )
    for line in [line.removeprefix("#SBATCH") for line in comments if re.match(r"#SBATCH\s", line)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"script=#SBATCH{line}: cannot be read: {error}") from None
        while words:
            word = words.pop(0)
            name, equals, value = word[2:].partition("=")
            if re.match(r"-[A-Za-z]", word):
                name, equals, value = long.get(word[1], word[1]), word[2:], word[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)  # `--time 20:00:00`: a word after an option is its value
            if word.startswith("-"):
                found[name] = value
    return found


def gres_gpus(gres: str) -> int:
    """The number of GPUs in a --gres value: 8 in "gpu:8", "gpu:a100:8" or "gpu:a100:8,nvme:1", 1 in
    "gpu".
    """
    counts = [
        re.search(r":(\d+)$", part) for part in gres.split(",") if part.split(":")[0] == "gpu"
    ]
    return sum(int(count[1]) if count else 1 for count in counts)
