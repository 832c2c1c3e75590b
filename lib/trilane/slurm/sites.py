"""Site: one SLURM cluster's partitions, QoS and rules, from data/sites/ or a JSON file; JobRequest: a job's options."""

import math
import os
import re
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

from trilane.config import cluster as hardware
from trilane.slurm.site_options import plain, require_constraint, require_options
from trilane.utils.validation import (
    from_mapping,
    read_json,
    require,
    require_integer,
    require_known,
    require_line,
    require_path,
    require_positive,
    shown,
)

LOCAL = "local"

NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,3999}")
TIME = re.compile(r"(?:[0-9]{1,5}-)?[0-9]{1,6}:[0-5][0-9]:[0-5][0-9]")
SBATCH_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
COMMENT = re.compile(r"[\w.,:;@+=/()][\w .,:;@+=/()-]{0,199}")
CHOICES = {"launcher": ("torchrun", "deepspeed", "srun"), "nccl_debug": ("VERSION", "WARN", "INFO", "TRACE")}


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service: the longest job in hours, and the most GPUs of a job."""

    name: str
    hours: float
    gpus: int

    def __post_init__(self) -> None:
        plain("qos.name", self.name)
        require_positive("qos.hours", self.hours)
        require_positive("qos.gpus", self.gpus)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One set of nodes of a SLURM cluster.

    cluster            its nodes (GPUs, cores, counts) in the catalogue of clusters; "": the cluster of the plan
    partition          the partition of a job; "": the constraint or the account selects it
    partitions         all partitions; empty: not known
    service_partition  the partition in which a job that only monitors costs nothing
    features           those that nodes must have besides the constraint
    account_ending     the suffix of an account for these nodes
    modules            the arguments of `module load`, in order
    qos, default_qos   the qualities of service, and the one of a job that names none
    offline            whether compute nodes have no internet
    local              folders that are local to each node
    env, setup         variables, and shell lines that run in order as they are; the first that fails ends the job
    host_suffix        what ends the name of a node on the network on which the processes meet
    sbatch, srun       further #SBATCH options by their long names, and further arguments of srun
    mem, exclusive     memory of a node, such as 480G or 0 (all); whether the job has its nodes for itself
    switches, segment  how near to each other the nodes must be: at most so many switches, or blocks of so many nodes
    gpu_option         how GPUs are requested, gres or gpus-per-node; gpu_type is their type there, such as a100
    stage_env          a folder of each node, such as /tmp or $TMPDIR, to which it copies Python's environment; "": none
    container          what runs container_image, with the folders container_mounts: pyxis, apptainer or singularity
    sources            the source of each number
    """

    name: str
    cluster: str = ""
    partition: str = ""
    partitions: tuple[str, ...] = ()
    service_partition: str = ""
    constraint: str = ""
    features: tuple[str, ...] = ()
    account_ending: str = ""
    hint: str = ""
    modules: tuple[str, ...] = ()
    qos: tuple[Qos, ...] = ()
    default_qos: str = ""
    offline: bool = False
    local: tuple[str, ...] = ("/tmp", "/dev/shm")
    env: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    host_suffix: str = ""
    sbatch: dict[str, str] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    mem: str = ""
    exclusive: bool = False
    switches: str = ""
    segment: int = 0
    gpu_option: str = "gres"
    gpu_type: str = ""
    stage_env: str = ""
    container: str = ""
    container_image: str = ""
    container_mounts: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name), "site.name", repr(self.name), "must be a name")
        for name in ("name", "cluster"):
            require_line(f"site.{name}", getattr(self, name))
        for name in ("partition", "service_partition", "hint"):
            if word := getattr(self, name):
                plain(f"site.{name}", word)
        for name in ("partitions", "modules", "features"):
            for word in getattr(self, name):
                plain(f"site.{name}", word)
        require_constraint("site.constraint", self.constraint)
        plain("site.account_ending", f"account{self.account_ending}")
        for folder in self.local:
            require_path("site.local", folder)
        if self.cluster and not self.cluster.endswith(".json"):
            require_known("site.cluster", self.cluster, hardware.catalogue())
        if self.default_qos:
            require_known("site.default_qos", self.default_qos, [q.name for q in self.qos])
        require_options(self)

    @property
    def nodes_wanted(self) -> str:
        """The --constraint of a job that names none."""
        return "&".join(filter(None, (self.constraint, *self.features)))

    @property
    def is_local(self) -> bool:
        """Whether a plan runs on this machine, without SLURM."""
        return self.name == LOCAL

    def limits(self, qos: str) -> Qos | None:
        """The limits of that QoS ("": the default one), None where the site does not list it."""
        return next((q for q in self.qos if q.name == (qos or self.default_qos)), None)


def catalogue() -> list[str]:
    """Names of the sites that are part of trilane."""
    return sorted(p.name.removesuffix(".json") for p in resources.files("trilane").joinpath("data/sites").iterdir())


def site(name_or_path: str) -> Site:
    """The site of that name, or of the JSON file at that path; ValueError lists the known names, the nearest first."""
    if name_or_path.endswith(".json"):
        return _read(Path(name_or_path))
    rule = "has AMD's GPUs, for which trilane has neither kernels nor numbers"
    require(not name_or_path.lower().startswith("lumi"), "site", name_or_path, rule)
    require_known("site", name_or_path, catalogue())
    return _read(Path(str(resources.files("trilane").joinpath(f"data/sites/{name_or_path}.json"))))


def _read(path: Path) -> Site:
    found = from_mapping(Site, read_json(path, "site"), "site")
    # relative to the site's own file, not to the current folder
    nodes = path.parent / found.cluster
    return replace(found, cluster=str(nodes)) if found.cluster.endswith(".json") else found


def seconds_of(time_limit: str) -> float:
    """A time limit in seconds, in any form that sbatch accepts; infinite for no limit. ValueError for other forms.

    MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES and DAYS-HOURS:MINUTES:SECONDS;
    zero, UNLIMITED and INFINITE are no limit (man sbatch, --time). A job without one never receives --signal before it.
    """
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    found = SBATCH_TIME.fullmatch(time_limit)
    rule = "must be a time in a form of sbatch: 20:00:00, 1-12:00:00, 1-12, or 120 (minutes)"
    if found is None:
        raise ValueError(f"time_limit={shown(repr(time_limit))}: {rule}")
    days, *given = found.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]  # without hours
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The options of a job; "" omits a directive, or leaves it to the site.

    signal_s          seconds before the time limit at which the training receives SIGUSR1, to save a checkpoint
    requeue           whether SLURM starts the job again when a node fails
    launcher          what starts a node's processes: torchrun, DeepSpeed's launcher with a hostfile, or srun, as one
                      task for each GPU on cores of its own
    comment           a comment of yours on the job, which stays next to the one that marks the submission
    launch_blocking   CUDA_LAUNCH_BLOCKING=1, which kept a hang of BigScience's from recurring, at a price
    environment       "" for the repository's .venv, a folder of another venv (made absolute), or conda:NAME
    parallel          jobs of a sweep's array that may run at the same time
    spares            nodes beyond those of the plan, one of which takes the place of a node that fails
    preflight         whether the nodes of a job are tested before they train; never where there is only one
    """

    account: str = ""
    time_limit: str = "02:00:00"
    qos: str = ""
    partition: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    mail: str = ""
    comment: str = ""
    signal_s: int = 300
    requeue: bool = True
    launcher: str = "torchrun"
    launch_blocking: bool = False
    nccl_debug: str = "WARN"
    environment: str = ""
    parallel: int = 4
    spares: int = 0
    preflight: bool = True

    def __post_init__(self) -> None:
        for name in ("account", "qos", "partition", "reservation", "mail"):
            if value := getattr(self, name):
                plain(name, value)
        require_constraint("constraint", self.constraint)
        is_list = not self.exclude or NODES.fullmatch(self.exclude) is not None
        require(is_list, "exclude", repr(self.exclude), "must be a list of nodes, such as gpu[1-3],gpu7")
        rule = "must be at most 200 letters, digits, blanks and _ . , : ; @ + = / ( ) -"
        require(not self.comment or COMMENT.fullmatch(self.comment) is not None, "comment", repr(self.comment), rule)
        require_line("environment", self.environment)
        if self.environment.startswith("conda:"):
            plain("environment", self.environment.removeprefix("conda:"))
        elif self.environment:
            # the script runs in another folder, and bash does not expand a quoted ~
            folder = os.path.expanduser(self.environment)
            object.__setattr__(self, "environment", folder if os.path.isabs(folder) else os.path.abspath(folder))
        rule = "must be [DAYS-]HH:MM:SS, such as 20:00:00"
        require(TIME.fullmatch(self.time_limit) is not None, "time_limit", repr(self.time_limit), rule)
        is_long = 60 <= seconds_of(self.time_limit) < math.inf
        require(is_long, "time_limit", self.time_limit, "must be a minute or more")
        require_integer("signal_s", self.signal_s, 0)
        rule = f"must be less than time_limit={self.time_limit}"
        require(self.signal_s < self.time_limit_s, "signal_s", self.signal_s, rule)
        require_integer("parallel", self.parallel, 1)
        require_integer("spares", self.spares, 0)
        for name, known in CHOICES.items():
            require_known(name, getattr(self, name), known)

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds."""
        return int(seconds_of(self.time_limit))

    def given(self) -> list[str]:
        """The names of the options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]
