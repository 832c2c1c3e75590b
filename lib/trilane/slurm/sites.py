"""Site: the partitions, QoS, modules and rules of one SLURM cluster, from data/sites/ or a JSON file."""

import dataclasses
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from trilane.config import cluster as hardware
from trilane.utils.validation import from_mapping, read_json, require, require_known, require_positive

LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service: the longest job in hours, and the most GPUs of a job."""

    name: str
    hours: float
    gpus: int

    def __post_init__(self) -> None:
        require_positive("qos.hours", self.hours)
        require_positive("qos.gpus", self.gpus)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One set of nodes of a SLURM cluster.

    cluster            its nodes (GPUs, cores, counts) in the catalogue of clusters; "": the cluster of the plan
    partition          the partition of a job; "": the constraint or the account selects it
    partitions         all partitions; empty: not known
    service_partition  the partition in which a job that only monitors costs nothing
    account_ending     the suffix of an account for these nodes
    modules            the arguments of `module load`, in order
    qos, default_qos   the qualities of service, and the one of a job that names none
    offline            whether compute nodes have no internet
    local              folders that are local to each node
    sources            the source of each number
    """

    name: str
    cluster: str = ""
    partition: str = ""
    partitions: tuple[str, ...] = ()
    service_partition: str = ""
    constraint: str = ""
    account_ending: str = ""
    hint: str = ""
    modules: tuple[str, ...] = ()
    qos: tuple[Qos, ...] = ()
    default_qos: str = ""
    offline: bool = False
    local: tuple[str, ...] = ("/tmp", "/dev/shm")
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name), "site.name", repr(self.name), "must be a name")
        if self.cluster and not self.cluster.endswith(".json"):
            require_known("site.cluster", self.cluster, hardware.catalogue())
        if self.default_qos:
            require_known("site.default_qos", self.default_qos, [q.name for q in self.qos])

    @property
    def is_local(self) -> bool:
        """Whether a plan runs on this machine, without SLURM."""
        return self.name == LOCAL

    def limits(self, qos: str) -> Qos | None:
        """The limits of that QoS ("": the default one), None where the site has none; ValueError if unknown."""
        name = qos or self.default_qos
        if not self.qos or not name:
            return None
        require_known("qos", name, [q.name for q in self.qos])
        return next(q for q in self.qos if q.name == name)


def catalogue() -> list[str]:
    """Names of the sites that are part of trilane."""
    return sorted(p.name.removesuffix(".json") for p in resources.files("trilane").joinpath("data/sites").iterdir())


def site(name_or_path: str) -> Site:
    """The site of that name, or of the JSON file at that path; ValueError lists the known names, the nearest first."""
    if name_or_path.endswith(".json"):
        return _read(Path(name_or_path))
    require_known("site", name_or_path, catalogue())
    return _read(Path(str(resources.files("trilane").joinpath(f"data/sites/{name_or_path}.json"))))


def _read(path: Path) -> Site:
    found = from_mapping(Site, read_json(path, "site"), "site")
    # relative to the site's own file, not to the current folder
    nodes = path.parent / found.cluster
    return dataclasses.replace(found, cluster=str(nodes)) if found.cluster.endswith(".json") else found
