"""What a site adds to the job scripts: variables, shell lines, options of sbatch and srun, a container; all checked."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from trilane.utils.validation import require, require_integer, require_known, require_line, require_path

# characters of a directive or an assignment that neither bash nor sbatch interprets
PLAIN = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_.,@:+=/-]{0,199}")
CONSTRAINT = re.compile(
    r"[A-Za-z0-9_(\[][A-Za-z0-9_.,@:+=/()\[\]&|*-]{0,199}"
)  # features, and SLURM's signs between them
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
OPTION = re.compile(r"[a-z][a-z0-9-]{1,40}")
HOST_SUFFIX = re.compile(r"[A-Za-z0-9.-]{0,60}")
SRUN_WORD = re.compile(r"--([a-z][a-z0-9-]{1,40})(=.*)?")
MEMORY = re.compile(r"\d{1,9}[KMGT]?")
SWITCHES = re.compile(r"\d{1,4}(@[0-9:-]{1,20})?")
IMAGE_URI = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@#+-]{0,199}")
APPTAINER = ("apptainer", "singularity")
PART = r"(?:[A-Za-z0-9_.+-]|\$[A-Za-z_]\w*+|\$\{[A-Za-z_]\w*+\})++"
STAGE = re.compile(rf"(?=[/$])/?{PART}(?:/{PART})*+", re.ASCII)
CONTAINERS = ("", "pyxis", *APPTAINER)
GPU_OPTIONS = ("gres", "gpus-per-node")

# Variables that the scripts set after the site's, or that processes of a step get from SLURM or torchrun.
OWN_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE", "HOSTFILE", "TRILANE_SWEEP", "VENV", "PATH"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE", "HF_HUB_OFFLINE"),
    *("HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH"),
    *("LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TRAIN_NODES", "TRAIN_NODELIST", "TRAIN_HOSTS", "RDZV_ID"),
    *("TRILANE_CODE", "HOST_SUFFIX", "PYTHONSAFEPATH"),
    *("IFS", "UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"),  # bash's own; to set most of them ends the script
)
OF_A_SITE = ("TRILANE_VENV", "TRILANE_OUTPUTS", "TRILANE_HOME")  # of trilane's own variables
# Options of sbatch that the scripts set from the plan, the site's other fields and the request, or that change what
# they mean.
OWN_DIRECTIVES = (
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gres", "gpus-per-node", "hint", "time", "account"),
    *("partition", "constraint", "qos", "reservation", "exclude", "mail-user", "mail-type", "comment", "mem"),
    *("exclusive", "switches", "segment", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "array"),
    "no-kill",
    *("ntasks", "gpus", "gpus-per-task", "ntasks-per-gpu", "cpus-per-gpu", "nodelist", "chdir", "dependency", "wrap"),
    *("oversubscribe", "overcommit", "parsable", "test-only", "wait", "uid", "gid", "input", "help", "version"),
)
# Options of srun that the scripts set, or that would lead the log elsewhere.
OWN_SRUN = (
    *("kill-on-bad-exit", "wait", "nodes", "nodelist", "ntasks", "ntasks-per-node", "cpus-per-task", "output", "error"),
    *("input", "exclude", "relative", "multi-prog", "pty", "chdir", "jobid", "no-kill", "gpus", "gres", "test-only"),
    *("time", "unbuffered", "help", "version", "no-allocate", "async", "gpus-per-node", "export"),
)


class Options(Protocol):
    """The fields of a site that this module reads."""

    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def setup(self) -> Sequence[str]: ...
    @property
    def srun(self) -> Sequence[str]: ...
    @property
    def sbatch(self) -> Mapping[str, str]: ...
    @property
    def host_suffix(self) -> str: ...
    @property
    def stage_env(self) -> str: ...
    @property
    def mem(self) -> str: ...
    @property
    def exclusive(self) -> bool: ...
    @property
    def switches(self) -> str: ...
    @property
    def segment(self) -> int: ...
    @property
    def gpu_type(self) -> str: ...
    @property
    def gpu_option(self) -> str: ...
    @property
    def container(self) -> str: ...
    @property
    def container_image(self) -> str: ...
    @property
    def container_mounts(self) -> Sequence[str]: ...


def directives_of(site: Options) -> list[str]:
    """The site's further #SBATCH options, as NAME or NAME=VALUE."""
    return [f"{name}={value}" if value else name for name, value in site.sbatch.items()]


def plain(field: str, value: str) -> str:
    """`value`; ValueError where bash or sbatch would interpret it."""
    rule = "must consist of letters, digits and _ . , @ : + = / - (200 at most), and not begin with a dash"
    require(PLAIN.fullmatch(value) is not None, field, repr(value), rule)
    return value


def require_constraint(field: str, value: str) -> None:
    """ValueError unless `value` is a --constraint, such as "a100" or "gpu&hbm80g" (man sbatch); "" is none."""
    rule = "must be features of nodes, with & | * ( ) [ ] between them, such as gpu&hbm80g"
    require(not value or CONSTRAINT.fullmatch(value) is not None, field, repr(value), rule)


def require_options(site: Options) -> None:
    """ValueError for an option that is no option, that the scripts set themselves, or that contradicts another."""
    for name, value in site.env.items():
        is_name = VARIABLE.fullmatch(name) is not None
        require(is_name, "site.env", repr(name), "must be the name of a variable: letters, digits and _")
        rule = "is a secret, which no file holds: export it where you submit, or in a file that setup sources"
        require(name != "TRILANE_WEBHOOK", "site.env", name, rule)
        is_own = name in OWN_VARIABLES or name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        is_own = is_own or (name.startswith("TRILANE_") and name not in OF_A_SITE)
        remedy = "; extend it in a line of setup" if name in ("PATH", "PYTHONPATH") else ""
        require(not is_own, "site.env", name, f"is set by the script, by bash or by SLURM{remedy}")
        require_line(f"site.env.{name}", value)
    for number, line in enumerate(site.setup, 1):
        require_line(f"site.setup, line {number}", line)
        require(bool(line.strip()), f"site.setup, line {number}", repr(line), "is empty")
    for name, value in site.sbatch.items():
        rule = "must be the long name of an option of sbatch, without dashes, such as licenses"
        require(OPTION.fullmatch(name) is not None, "site.sbatch", repr(name), rule)
        _require_other("site.sbatch", f"--{name}", name, OWN_DIRECTIVES)
        if value:
            plain(f"site.sbatch.{name}", value)
    for word in site.srun:
        require_line("site.srun", word)
        found = SRUN_WORD.fullmatch(word)
        rule = "must be a long option of srun in one word, such as --mpi=none"
        require(found is not None, "site.srun", repr(word), rule)
        assert found is not None
        _require_other("site.srun", word, found[1], OWN_SRUN)
    rule = "must be letters, digits, dots and dashes, such as i for node1i"
    require(HOST_SUFFIX.fullmatch(site.host_suffix) is not None, "site.host_suffix", repr(site.host_suffix), rule)
    if site.stage_env:
        rule = "must be a folder of each node, such as /tmp or $JOBSCRATCH/env (letters, digits and _ . + -)"
        require(STAGE.fullmatch(site.stage_env) is not None, "site.stage_env", repr(site.stage_env), rule)
        require(
            not site.container_image, "site.stage_env", site.stage_env, "contradicts container_image: it is one file"
        )
    _require_nodes(site)
    _require_container(site)


def _require_other(field: str, shown: str, name: str, own: Collection[str]) -> None:
    """ValueError where `name`, which SLURM lets a user abbreviate, is one of the script's own options."""
    known = next((option for option in own if option.startswith(name)), "")
    rule = f"the script sets --{known} itself; use the site's or the job's own field"
    require(not known, field, shown, rule)


def _require_nodes(site: Options) -> None:
    if site.mem:
        require(MEMORY.fullmatch(site.mem) is not None, "site.mem", repr(site.mem), "must be such as 480G, or 0 (all)")
        given = [name for name in ("mem-per-cpu", "mem-per-gpu") if name in site.sbatch]
        require(not given, "site.mem", site.mem, f"contradicts site.sbatch {', '.join(given)}")
    if site.exclusive:
        rule = "with exclusive must be 0 (all of a node) or empty: the job has the nodes for itself"
        require(site.mem.strip("0KMGT") == "", "site.mem", site.mem, rule)
    if site.switches:
        rule = "must be a number of switches, such as 1, or with the longest wait for them, 1@12:00:00"
        require(SWITCHES.fullmatch(site.switches) is not None, "site.switches", repr(site.switches), rule)
    require_integer("site.segment", site.segment, 0, 1_000_000)
    is_one = not (site.switches and site.segment)
    require(is_one, "site.switches", site.switches, "cannot be combined with segment: choose one of the two")
    if site.gpu_type:
        plain("site.gpu_type", site.gpu_type)
        is_word = not set(site.gpu_type) & set(":,=")
        require(is_word, "site.gpu_type", site.gpu_type, "must be one type, such as a100")
    require_known("site.gpu_option", site.gpu_option, GPU_OPTIONS)


def _require_container(site: Options) -> None:
    require_known("site.container", site.container, CONTAINERS)
    image, words = site.container_image, [word.partition("=")[0] for word in site.srun]
    given = [word for word in words if word.startswith("--container")]
    if site.container:
        require(bool(image), "site.container", site.container, "needs container_image")
        rule = f"contradicts site.container={site.container}"
        require(not given or site.container == "pyxis", "site.srun", ", ".join(given), rule)
        own = [w for w in given if w in ("--container-image", "--container-mounts", "--container-workdir")]
        require(not own, "site.srun", ", ".join(own), "is what container_image and container_mounts set")
    else:
        require(not image, "site.container_image", image, f"needs container, one of {', '.join(CONTAINERS[1:])}")
        mounts = ", ".join(site.container_mounts)
        require(not mounts, "site.container_mounts", mounts, "needs container and container_image")
    if image and not image.startswith("/"):
        rule = "must be an absolute path, or an image's address such as docker://nvcr.io/nvidia/pytorch:25.01-py3"
        require(
            IMAGE_URI.fullmatch(image) is not None and ("/" in image or "#" in image),
            "site.container_image",
            image,
            rule,
        )
    if image:
        require_path("site.container_image", image)
    for mount in site.container_mounts:
        require_path("site.container_mounts", mount)
        is_mount = mount.startswith("/") and "," not in mount and mount.count(":") <= 2
        require(is_mount, "site.container_mounts", mount, "must be FOLDER, FOLDER:INSIDE or FOLDER:INSIDE:ro, absolute")


def image_file(site: Options) -> str:
    """The path of the site's container image, "" where it has none or the image comes from a registry."""
    return site.container_image if site.container_image.startswith("/") else ""


def srun_arguments(site: Options, launcher: str) -> str:
    """What the scripts give srun beyond their own options, each quoted for bash and followed by a blank; "" for none.

    With Apptainer the string ends in its command, so that what follows runs inside the image. The run folder and the
    frozen code are mounted at their own paths, and the run folder is the current one.
    """
    words = [shlex.quote(word) for word in site.srun]
    # one task for each GPU is bound to its own cores, and so to the NUMA node that they are on
    if launcher == "srun" and not any(word.startswith(("--cpu-bind", "--cpu_bind")) for word in site.srun):
        words.append("--cpu-bind=cores")
    image, mounts = shlex.quote(site.container_image), site.container_mounts
    if site.container == "pyxis":
        every = "".join(f",{shlex.quote(m if ':' in m else f'{m}:{m}')}" for m in mounts)
        code = '${TRILANE_CODE:+",$TRILANE_CODE:$TRILANE_CODE"}'  # the frozen code, which may lie in another folder
        own = f'--container-mounts="$PWD:$PWD"{code}{every}'
        words += [f"--container-image={image}", own, '--container-workdir="$PWD"']
    elif site.container:
        binds = [f"--bind {shlex.quote(m)}" for m in mounts]
        own = '--bind "$PWD" --pwd "$PWD" ${TRILANE_CODE:+--bind "$TRILANE_CODE"}'
        words += [site.container, "exec --nv", own, *binds, image]
    return "".join(f"{word} " for word in words)
