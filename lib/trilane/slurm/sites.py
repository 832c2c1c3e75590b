"""Site: one SLURM cluster's partitions, QoS and rules, from data/sites/ or a JSON file; JobRequest:
a job's options.
"""

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.options import check, option
from trilane.utils.frozen import frozen
from trilane.utils.hooks import hook
from trilane.utils.masking import secret_in
from trilane.utils.tables import Record
from trilane.utils.validation import (
    DATA,
    from_mapping,
    read_json,
    require,
    require_known,
    require_line,
    require_path,
    shipped_json,
)

SHIPPED = DATA / "sites"
# chdir, gid, uid and wrap, however abbreviated; what bash or each program of a job would load
OTHER_CODE = re.compile(
    r"(?:^--(?:ch|gi|ui|wr)\w*|\b(?:BASH_ENV|ENV|LD_PRELOAD|LD_AUDIT|SHELLOPTS|BASHOPTS))(?==|$)"
)


def require_form(form: str, name: str, text: str) -> None:
    """Raise ValueError unless `text`, one line, has that form of data/forms.json: a pattern, and it
    in words.

    None holds what bash or sbatch would interpret.
    """
    require_line(name, text)
    pattern, rule = shipped_json("forms")[form]
    require(re.fullmatch(pattern, text, re.ASCII), name, repr(text), rule)


def _require_rules(values: Any, prefix: str = "") -> None:
    """ValueError for the first field that breaks the rule in its metadata; an empty text is one
    that is not given.
    """
    check(values, prefix)
    for field in fields(values):
        value = getattr(values, field.name)
        if "form" in field.metadata and value:
            for text in value if isinstance(value, tuple) else [value]:
                require_form(field.metadata["form"], prefix + field.name, text)


@frozen
class Qos:
    """A quality of service: the longest job in hours, and the most GPUs of a job."""

    name: str = option(help="its name", form="word")
    hours: float = option(help="longest job", above=0)
    gpus: int = option(help="most GPUs of a job", minimum=1)

    def __post_init__(self) -> None:
        _require_rules(self, "qos.")


@frozen
class Site:
    """One set of nodes of a SLURM cluster, as its file describes it."""

    name: str = option(help="its name")
    cluster: str = option("", "name or file of its nodes' cluster; else the plan's own")
    partition: str = option(
        "", "`--partition`, where constraint or account do not select it", form="word"
    )
    service_partition: str = option("", "where a job of one core prepares a corpus", form="word")
    constraint: str = option(
        "", "`--constraint`: features of the nodes, such as `gpu&hbm80g`", form="constraint"
    )
    account_ending: str = option(
        "", "what accounts for these nodes end with, such as `@a100`", form="ending"
    )
    modules: tuple[str, ...] = option((), "modules to load, in order", form="word")
    qos: tuple[Qos, ...] = option((), "qualities of service, see below")
    default_qos: str = option("", "the one that a job gets if it names none")
    offline: bool = option(False, "whether compute nodes have no internet")
    local: tuple[str, ...] = option(("/tmp", "/dev/shm"), "folders that each node has for itself")
    env: dict[str, str] = option(
        dict, 'variables of every job, such as `{"NCCL_SOCKET_IFNAME": "ib0"}`'
    )
    setup: tuple[str, ...] = option(
        (), "lines of shell, in order; the first that fails ends the job with its number"
    )
    host_suffix: str = option(
        "", "ends a node's name on the network where processes meet", form="ending"
    )
    sbatch: dict[str, str] = option(
        dict, 'further options of a training: `{"mem": "0", "exclusive": ""}`'
    )
    srun: tuple[str, ...] = option(
        (), 'further arguments of `srun`: `["--mpi=none"]`', form="srun option"
    )
    gpu_option: str = option("gres", "how GPUs are requested", choices=("gres", "gpus-per-node"))
    gpu_type: str = option("", "their type there: `a100` gives `--gres=gpu:a100:4`", form="type")
    container: str = option(
        "", "runs container_image", choices=("", "pyxis", "apptainer", "singularity")
    )
    container_image: str = option(
        "", "an absolute path, or an address such as `docker://...`", form="image"
    )
    container_mounts: tuple[str, ...] = option((), "folders that the container sees", form="mount")
    responses: dict[str, tuple[str, ...]] = option(
        dict, 'what follows a verdict of data/responses.json, in order: `{"hang": ["stop"]}`'
    )
    sources: dict[str, str] = option(dict, "where each value comes from")

    def __post_init__(self) -> None:
        require_line("site.name", self.name)
        require_line("site.cluster", self.cluster)
        self._require_harmless()  # before a message quotes a secret
        _require_rules(self, "site.")
        for folder in self.local:
            require_path("site.local", folder)
        if self.cluster and not self.cluster.endswith(".json"):
            require_known("site.cluster", self.cluster, hardware.catalogue())
        self._require_words()
        hook("responses")("site.responses", self.responses)
        image = self.container_image
        rule = "and container_image need each other"
        require(bool(self.container) == bool(image), "site.container", self.container, rule)

    def _require_harmless(self) -> None:
        """ValueError for a password or key, which others could read, and for what runs something
        else than the script; a secret's value is in no message.
        """
        texts = [("env", f"{name}={value}") for name, value in self.env.items()]
        texts += [("setup", line) for line in self.setup]
        texts += [("sbatch", f"--{name}={value}") for name, value in self.sbatch.items()]
        texts += [("srun", word) for word in self.srun]
        rule = "looks like a secret, in files that others read: write `export NAME=...` to a file "
        rule += "of mode 600 in $HOME, and `source` it in a line of setup"
        for field, text in texts:
            secret = secret_in(text)
            require(not secret, f"site.{field}", secret, rule)
            other = "".join(OTHER_CODE.findall(text))
            require(not other, f"site.{field}", other, "would run other code than the script")

    def _require_words(self) -> None:
        """ValueError for variables, shell lines and options that are none."""
        own, rule = shipped_json("forms")["own variable"]
        for name, value in self.env.items():
            require_form("variable", "site.env", name)
            require(not re.fullmatch(own, name), "site.env", name, rule)
            require_line(f"site.env.{name}", value)
        for number, line in enumerate(self.setup, 1):
            require_line(f"site.setup, line {number}", line)
        for name, value in self.sbatch.items():
            require_form("sbatch option", "site.sbatch", name)
            if value:
                require_form("word", f"site.sbatch.{name}", value)

    @property
    def image_file(self) -> str:
        """The path of the container image, "" where there is none or the image comes from a
        registry.
        """
        if self.container_image.startswith("/"):
            return self.container_image
        return ""

    @property
    def is_local(self) -> bool:
        """Whether a plan runs on this machine, without SLURM."""
        return self.name == "local"


def catalogue() -> list[str]:
    """Names of the sites that are part of trilane."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def site(name_or_path: str) -> Site:
    """The site of that name, or of the JSON file at that path; ValueError lists the known names,
    the nearest first.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        require_known("site", name_or_path, catalogue())
        path = SHIPPED / f"{name_or_path}.json"
    read = from_mapping(Site, read_json(path, "site"), "site")
    nodes = read.cluster
    if nodes.endswith(".json"):  # relative to the site's own file
        nodes = str(path.parent / nodes)
    return replace(read, cluster=nodes)


@frozen
class JobRequest(Record):
    """The options of a job; "" omits a directive, or leaves it to the site.

    JobRequest(account="xyz@a100", time_limit="20:00:00")
    """

    account: str = option("", "whose hours a job uses, such as xyz@a100", form="word")
    time_limit: str = option("02:00:00", "of a job, [DAYS-]HH:MM:SS")
    qos: str = option("", "quality of service", form="word")
    partition: str = option("", "instead of the site's", form="word")
    constraint: str = option("", "features of the nodes, instead of the site's", form="constraint")
    reservation: str = option("", "name of a reservation", form="word")
    exclude: str = option("", "nodes that a job avoids, such as gpu[1-3],gpu7", form="nodes")
    mail: str = option("", "address to which SLURM mails ends, failures and requeues", form="word")
    signal_s: int = option(300, "seconds before the time limit at which a checkpoint is saved")
    launcher: str = option(
        "torchrun",
        "what starts a node's processes; srun: each as a task on cores of its own",
        choices=("torchrun", "srun"),
    )
    environment: str = option(
        "", "a venv's folder, or conda:NAME, instead of the repository's .venv"
    )
    spares: int = option(0, "nodes more than the plan's, which take the place of those that fail")
    preflight: bool = option(True, "whether the nodes of a job are tested before they train")

    def __post_init__(self) -> None:
        _require_rules(self)
        require_line("environment", self.environment)
        if self.environment.startswith("conda:"):
            require_form("word", "environment", self.environment.removeprefix("conda:"))
        elif self.environment:
            # the script runs in another folder, and bash does not expand a quoted ~
            path = os.path.abspath(os.path.expanduser(self.environment))
            object.__setattr__(self, "environment", path)
        rule = "must be a minute or more"
        require(self.time_limit_s >= 60, "time_limit", self.time_limit, rule)
        rule = f"must be less than time_limit={self.time_limit}"
        require(self.signal_s < self.time_limit_s, "signal_s", self.signal_s, rule)

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds; ValueError where it has another form."""
        pattern = r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d):(\d\d)"
        match = re.fullmatch(pattern, self.time_limit, re.ASCII)
        rule = "must be [DAYS-]HH:MM:SS, such as 20:00:00 or 1-12:00:00"
        require(match, "time_limit", repr(self.time_limit), rule)
        assert match
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((24 * days + hours) * 60 + minutes) * 60 + seconds
