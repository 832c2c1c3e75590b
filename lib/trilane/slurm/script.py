"""Job scripts: a template of slurm_templates/ rendered for a plan, a site and a request."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from trilane.config import cluster as hardware
from trilane.config.plan import Plan
from trilane.costmodel.predict import predict
from trilane.slurm.sites import JobRequest, Site, require_form
from trilane.utils.validation import require, require_known, require_new
from trilane.workspace.installation import checkout, shipped
from trilane.workspace.run import write_text

NAMES = ("train", "bench", "prepare", "interactive")
# the file name in a run folder
SCRIPT = "job.sbatch"


def render(name: str, plan: Plan, site: Site, request: JobRequest) -> str:
    """The sbatch script of template `name`.

    Raises ValueError for a value that bash or sbatch would interpret, an option that the template
    sets itself and GPUs that do not fill their nodes.
    """
    require_known("template", name, NAMES)
    plain = replace(site, sbatch={}, srun=(), env={})
    _require_once(_filled(name, _blanks(name, plan, plain, request)), site)
    return _filled(name, _blanks(name, plan, site, request))


def _require_once(script: str, site: Site) -> None:
    """ValueError where the site sets what the script itself sets: the last would count."""
    options = [("sbatch", f"--{name}") for name in site.sbatch]
    options += [("srun", word) for word in site.srun]
    # its own binding a site may replace
    own = script.replace("--cpu-bind", "")
    for field, word in options:
        # found also where it is abbreviated, as SLURM allows
        name = word.partition("=")[0]
        rule = f"the script sets {name} itself; use the site's or the job's own field"
        require(name not in own, f"site.{field}", word, rule)
    for name in site.env:
        is_own = re.search(rf"\b{name}=", script)
        require(not is_own, "site.env", name, "is set by the script itself")


def files(plan: Plan, site: Site, request: JobRequest) -> dict[str, str]:
    """A run folder's files by name: plan.json, the plan with its prediction, and job.sbatch."""
    values = {**plan.to_json(), "prediction": predict(plan, nodes_of(plan, site)).to_json()}
    return {"plan.json": json.dumps(values, indent=1), SCRIPT: render("train", plan, site, request)}


def create(plans: Mapping[Path, Plan], site: Site, request: JobRequest) -> list[Path]:
    """Write new run folders, each with the files of its plan; ValueError, and nothing is written,
    where one exists.
    """
    texts = {folder: files(plan, site, request) for folder, plan in plans.items()}
    for folder in texts:
        require_new("run folder", folder, "take a new one")
    for folder, by_name in texts.items():
        for name, text in by_name.items():
            write_text(folder / name, text)
    return list(texts)


def _blanks(name: str, plan: Plan, site: Site, request: JobRequest) -> dict[str, Any]:
    """Every value that a template may use, by name."""
    cluster = nodes_of(plan, site)
    gpus = plan.topology.gpus
    per_node = cluster.gpus_per_node
    nodes = -(-gpus // per_node)
    used = min(gpus, per_node)
    require(gpus == nodes * used, "tp x pp x dp", gpus, f"must fill whole nodes of {per_node} GPUs")
    rule = f"{cluster.name} has {cluster.max_nodes} nodes, of which the plan trains on {nodes}"
    require(nodes + request.spares <= cluster.max_nodes, "spares", request.spares, rule)
    require_form("word", "label", plan.label)
    is_cpu = cluster.gpu.kind == "cpu"
    # Jean Zay bills and binds by cores: a share of a node's GPUs gets the same share of its cores
    cores = max(1, cluster.cores_per_node * used // cluster.gpus_per_node)
    threads = max(1, cores // used)
    tasks = 1
    cores_per_task = cores
    if name == "bench" or (request.launcher == "srun" and name == "train"):
        tasks = used
        cores_per_task = threads
    srun = srun_arguments(site, request.launcher)
    conda = ""
    if request.environment.startswith("conda:"):
        conda = request.environment.removeprefix("conda:")
    root = checkout()
    environment = str(root / ".venv") if root else sys.prefix
    values = {
        **vars(site),
        **vars(request),
        "job_name": plan.label,
        "nodes": nodes + request.spares,
        "train_nodes": nodes,
        "preflight": request.preflight and nodes + request.spares > 1,
        "node_test": f"--test --gpus {0 if is_cpu else used} -- {srun}".strip(),
        "tasks_per_node": tasks,
        "processes_per_node": used,
        "gpus_per_node": "" if is_cpu else f"{site.gpu_type}:{used}".lstrip(":"),
        "cores_per_task": cores_per_task,
        "threads": threads,
        "partition": request.partition or site.partition,
        "constraint": request.constraint or site.constraint,
        "modules": " ".join(site.modules),
        "site_env": {name: quoted(f"site.env.{name}", value) for name, value in site.env.items()},
        "responses": quoted("site.responses", json.dumps(site.responses)) if site.responses else "",
        "setup": [quoted(f"site.setup, line {n}", line) for n, line in enumerate(site.setup, 1)],
        "site_name": quoted("site.name", site.name),
        "image": quoted("site.container_image", site.image_file) if site.image_file else "",
        "sbatch": [f"{name}={value}" if value else name for name, value in site.sbatch.items()],
        "srun_args": srun,
        "conda": conda,
        "venv": quoted("environment", request.environment or environment),
    }
    if name == "prepare":
        # a core, where the site has one for nothing: a service partition has neither the nodes nor
        # the QoS of the training
        asked = JobRequest() if site.service_partition else request
        values |= {
            "image": "",
            "sbatch": "",
            "gpus_per_node": "",
            "partition": request.partition or site.service_partition,
            "qos": asked.qos,
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
    is_bound = any(word.startswith("--cpu-bind") for word in site.srun)
    # one task for each GPU is bound to its own cores, and so to the NUMA node that they are on
    if launcher == "srun" and not is_bound:
        words.append("--cpu-bind=cores")
    image = shlex.quote(site.container_image)
    # the frozen code may lie in another folder than the run
    if site.container == "pyxis":
        mounts = '--container-mounts="$PWD:$PWD"${TRILANE_CODE:+",$TRILANE_CODE:$TRILANE_CODE"}'
        for mount in site.container_mounts:
            both = mount if ":" in mount else f"{mount}:{mount}"
            mounts += f",{shlex.quote(both)}"
        words += [f"--container-image={image}", mounts, '--container-workdir="$PWD"']
    elif site.container:
        words += [site.container, "exec --nv", '--bind "$PWD" --pwd "$PWD"']
        words.append('${TRILANE_CODE:+--bind "$TRILANE_CODE"}')
        words += [f"--bind {shlex.quote(mount)}" for mount in site.container_mounts]
        words.append(image)
    return "".join(f"{word} " for word in words)


def nodes_of(plan: Plan, site: Site) -> hardware.Cluster:
    """The cluster whose nodes the job gets: the site's, else the plan's own."""
    if site.cluster:
        return hardware.cluster(site.cluster)
    return plan.cluster


def quoted(field: str, text: str) -> str:
    """`text` quoted as one word of bash; ValueError unless it is printable, on one line."""
    require(text.isprintable(), field, repr(text), "must stay on one line")
    return shlex.quote(text)


def _filled(name: str, values: Mapping[str, Any]) -> str:
    """The template with these values."""
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
    return environment.get_template(f"{name}.sbatch").render(values)
