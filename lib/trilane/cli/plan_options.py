"""What the commands of `trilane plan` have in common: their options, and what these describe."""

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.cli.options import Checked, Choice, Parameter, option, together, whole
from trilane.config import parallelism
from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.engines import ENGINES, default_topology, label_of
from trilane.config.model import ModelShape
from trilane.config.options import read_field
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan_values
from trilane.config.shapes import read_shape
from trilane.utils.tables import one_line
from trilane.utils.validation import require
from trilane.workspace.study import load_cluster

if TYPE_CHECKING:
    from trilane.costmodel.calibration import Calibration
else:
    Calibration = Any

CHOICES = tuple(f.name for f in fields(Topology) if f.name != "gbs")
MOST_SEQUENCES = 1 << 20  # of one iteration; published runs have at most 16,384
WORDS = {name: Choice(words) for name, words in parallelism.CHOICES.items()}
SCORES = "scores: no flash kernel"
CALIBRATION = option(
    "--calibration",
    metavar="SOURCE",
    default="",
    help="constants: a JSON file or study of your own runs, or a software stack such as megatron-core; default: "
    "those that a plan's file keeps, else of the cluster's rows",
)
ENGINE = option("--engine", type=Choice(ENGINES), default=ENGINES[0], help="what trains it")
PRECISION = option("--precision", type=Choice(PRECISIONS), help="default: bf16 where the card has it")
SEQUENCE = option(
    "--seq", type=whole(), help="tokens of a sequence; default: the shape's, in a config.json its longest"
)


def choice(field: Field[Any]) -> Parameter:
    """The option of a field of Topology."""
    words, is_flag = field.metadata.get("choices"), field.type is bool
    metavar = f"[{'|'.join(words)}]" if words else "[yes|no]" if is_flag else "INTEGER"
    kind = Checked(metavar, lambda name, text: read_field(Topology, name, str(text)))
    return option(f"--{field.name.replace('_', '-')}", type=kind, metavar=metavar, help=field.metadata["help"])


SPACE = together(  # a model on a cluster, and the topologies of one number of GPUs
    SEQUENCE,
    option("--gbs", type=whole(1, MOST_SEQUENCES), help="sequences an iteration"),
    ENGINE,
    *(choice(field) for field in fields(Topology) if field.name in CHOICES),
    CALIBRATION,
)


def sizing_fields(options: dict[str, Any]) -> dict[str, Any]:
    """SizeRequest's fields from the options of `size`, all but the size."""
    from trilane.costmodel.shipped import calibration_for

    names = ("attention", "precision", "recompute", "partition", "fp32_gradients")
    cluster = load_cluster(options["cluster"])
    fields = {name: options[name] for name in ("gpus", "tokens", "gbs", "tolerance", "engine", "like")}
    fields |= {"vocabulary": options["vocab"], "seq_length": options["seq"], "cluster": cluster}
    fields |= {"calibration": calibration_for(cluster, options["calibration"])}
    return fields | {"choices": {name: options[name] for name in names if options[name]}}


def shape_of(text: str, options: dict[str, Any]) -> ModelShape:
    """The shape that is named, with the vocabulary padded; what was decided for it goes to stderr."""
    given = read_shape(text, seq_length=options["seq"] or 0, tp=options["tp"] or 1)
    for note in given.notes:
        print("trilane:", one_line(note), file=sys.stderr)
    return given.shape


def constants_of(plan: Path, cluster: Cluster, source: str) -> Calibration:
    """The constants that a plan's file keeps, or those of --calibration, which are then named on stderr."""
    from trilane.costmodel.shipped import calibration_of, replaced

    entry = read_plan_values(plan)
    found = calibration_of(entry, cluster, source)
    if line := replaced(entry, found, cluster):
        print("trilane:", one_line(line), file=sys.stderr)
    return found


def choices_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the options pin, by Topology's names and as search() takes it."""
    return {name: options[name] for name in CHOICES if options[name] is not None}


def plan_of(options: dict[str, Any]) -> Plan:
    """The plan that the options describe, with defaults for what they leave open."""
    require(options["shape"] is not None, "shape", "missing", "name a plan, or its --shape, --cluster and --gbs")
    for name in ("cluster", "gbs"):
        require(options[name] is not None, name, "missing", "needed where no plan is named")
    shape = shape_of(options["shape"], options)
    cluster, engine = load_cluster(options["cluster"]), options["engine"]
    given, gpus = choices_of(options), options["gpus"]
    if gpus is not None:
        replica = given.get("tp", 1) * given.get("cp", 1) * given.get("pp", 1)
        given.setdefault("dp", max(1, gpus // replica))
        what = "tp x cp x pp x dp" if "cp" in given else "tp x pp x dp"
        require(given["dp"] * replica == gpus, what, given["dp"] * replica, f"contradicts gpus={gpus}")
    topology = default_topology(shape, cluster, engine, gbs=options["gbs"], **given)
    label = label_of(shape, cluster, topology, engine)
    return Plan(label=label, shape=shape, cluster=cluster, topology=topology, engine=engine)
