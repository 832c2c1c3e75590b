"""A plan as an sbatch script: template + plan -> text."""

import re
from pathlib import Path

import jinja2

from trilane.checks import require
from trilane.plan import Plan
from trilane.store import REPOSITORY

TEMPLATES = REPOSITORY / "slurm_templates"
# what may stand in a directive or an assignment: nothing that bash or sbatch would read a second time
PLAIN = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_.,@:+=%/-]*")


def _plain(field: str, value: str) -> str:
    require(
        PLAIN.fullmatch(value) is not None, field, repr(value), "must hold only letters, digits and _ . , @ : + = % / -"
    )
    return value


def render(plan: Plan, *, account: str, constraint: str, time_limit: str = "02:00:00", template: str = "train") -> str:
    """The sbatch script that runs `plan` from its run folder, on whole nodes of its cluster.

    Submit it there: `cd outputs/<study>/runs/<label> && sbatch job.sbatch`. Raises ValueError for a value that bash or
    sbatch would read as something else, and for a GPU count that does not fill its nodes.
    """
    gpus, per_node = plan.topology.gpus, plan.cluster.gpus_per_node
    nodes = -(-gpus // per_node)
    used = min(gpus, per_node)
    require(gpus == nodes * used, "tp x pp x dp", gpus, f"must fill whole nodes of {per_node} GPUs")
    # {# would open a Jinja comment and swallow bash's ${#array[@]}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        comment_start_string="<#",
        comment_end_string="#>",
        keep_trailing_newline=True,
    )
    return environment.get_template(f"{template}.sbatch").render(
        job_name=_plain("label", plan.label),
        nodes=nodes,
        gpus_per_node=used,
        cores_per_node=plan.cluster.cores_per_node,
        threads=max(1, plan.cluster.cores_per_node // used),
        time_limit=_plain("time_limit", time_limit),
        account=_plain("account", account),
        constraint=_plain("constraint", constraint),
        repository=_plain("repository", str(Path(REPOSITORY))),
        summary=f"{plan.shape.parameters / 1e9:.3g}B, {plan.topology.label}, {gpus} GPUs, engine {plan.engine}",
    )
