"""The scripts: what they ask SLURM for and what they start, for every site and template; closed to
hostile values.
"""

import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.slurm import script, sites
from trilane.slurm.sites import JobRequest, Site

GOLDEN = Path(__file__).parents[1] / "golden"
PRESETS = [name for name in sites.catalogue() if name != "local"]
EVERYTHING = JobRequest(
    account="xyz@a100",
    time_limit="1-12:00:00",
    qos="qos_gpu_a100-t3",
    partition="gpu_p5",
    constraint="a100",
    reservation="hug",
    exclude="jean-zay-iam[01-03],jean-zay-iam11",
    mail="me@example.org",
    environment="conda:trilane",
    spares=1,
)


def plan_for(site: Site) -> Plan:
    """A GPT of 1.3B over two whole nodes of that site."""
    nodes_of = cluster(site.cluster or "jz-a100-80g")
    topology = Topology(
        tp=nodes_of.gpus_per_node // 2,
        pp=2,
        dp=2,
        mbs=1,
        gbs=64,
        precision="fp16",
        recompute="full",
    )
    shape = parse_shape("24,2048,16,2048,50304")
    return Plan(label="gpt-1b3", shape=shape, cluster=nodes_of, topology=topology)


def recorded(name: str) -> dict[str, str]:
    """Every template for that site, and a training that asks for everything."""
    site = sites.site(name)
    request = JobRequest(account=f"xyz{site.account_ending}", time_limit="02:00:00")
    texts = {t: script.render(t, plan_for(site), site, request) for t in script.NAMES}
    if name == "jean-zay-a100":
        texts["train-everything"] = script.render("train", plan_for(site), site, EVERYTHING)
    return {f"{template}-{name}.sbatch": text for template, text in texts.items()}


@pytest.fixture(autouse=True)
def at_home(monkeypatch) -> None:
    monkeypatch.setattr(script, "checkout", lambda: Path("/home/me/trilane"))


RECORDED = (
    "jean-zay-a100"  # one text of each template is recorded; what the others mean is checked below
)


def test_one_script_of_each_template_is_the_recorded_one():
    assert {path.name: path.read_text() for path in GOLDEN.glob("*.sbatch")} == recorded(RECORDED)


@pytest.mark.slow
def test_bash_and_shellcheck_accept_every_script(tmp_path):
    paths = []
    for file, text in {f: text for name in PRESETS for f, text in recorded(name).items()}.items():
        paths.append(tmp_path / file)
        paths[-1].write_text(text)
        subprocess.run(["bash", "-n", paths[-1]], check=True)
    shellcheck = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1091", *paths]
    checked = subprocess.run(shellcheck, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def directives(text: str) -> dict[str, str]:
    """The options that sbatch reads: of the comments before the first command; none twice."""
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    options = [
        line.removeprefix("#SBATCH --").partition("=")
        for line in comments
        if line.startswith("#SBATCH")
    ]
    assert len({name for name, _, _ in options}) == len(options)
    return {name: value for name, _, value in options}


# What a script calls, by name and arguments, one line a call; srun goes on with its command, as on
# the first node.
CALLED = r"""#!/bin/bash
printf -v line '%q ' "${0##*/}" "$@"
echo "$line" >>"$CALLS"  # in one write: others run besides
case "${0##*/} $*" in
srun*)
  while [[ $1 == -* ]]; do shift; done; exec "$@" ;;
scontrol*) echo n1; sleep "${PAUSE_S:-0}"; echo n2 ;;
*'job nodes .'*) echo 'n[1-2]' ;;
*'job begin .') echo "${BEGIN:-go: from the beginning}" ;;
*utils.append*) cat ;;
*engine.torchrun*) env >"$CALLS.env"; exit "${CODE:-0}" ;;
esac
"""
SRUN = ["srun", "--kill-on-bad-exit=1", "--wait=15"]
CORPUS = ["python", "-m", "trilane_engine.data.corpus", "--in-job", "plan.json"]
BEGIN, CHOICE, END = (
    ["python", "-m", "trilane", "slurm", "job", word, "."] for word in ("begin", "nodes", "end")
)
HOSTS = ["scontrol", "show", "hostnames", "n[1-2]"]


class Play:
    """A script run by bash as on the first of its two nodes, its commands being ones that only note
    their arguments.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.log, self.errors = place, place / "calls", ""
        (place / "bin").mkdir()
        (place / "bin/activate").touch()
        for name in ("python", "srun", "scontrol", "sbatch", "salloc", "nvidia-smi", "conda"):
            (place / "bin" / name).write_text(CALLED)
            (place / "bin" / name).chmod(0o755)

    def run(self, text: str, *arguments: str, **more: str) -> int:
        """The script's exit code; it prints no errors unless it has arguments."""
        job = {
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_NODEID": "0",
        }
        more = {**job, "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "64", **more}
        module = {"BASH_FUNC_module%%": '() { echo "module $*" >>"$CALLS"; }'}
        path = f"{self.place / 'bin'}:{os.environ['PATH']}"
        env = {
            "PATH": path,
            "CALLS": str(self.log),
            "TRILANE_VENV": str(self.place),
            **module,
            **more,
        }
        (self.place / "job.sbatch").write_text(text)
        done = subprocess.run(
            ["bash", "job.sbatch", *arguments],
            cwd=self.place,
            env=env,
            capture_output=True,
            text=True,
        )
        self.errors = done.stderr
        assert arguments or not done.stderr, done.stderr
        return done.returncode

    @property
    def calls(self) -> list[list[str]]:
        """What was called, with its arguments; of srun only its own options."""
        calls = [shlex.split(line) for line in self.log.read_text().splitlines()]
        calls = [
            call for call in calls if not {"guard", "trilane.utils.append"} & {*call}
        ]  # which run besides, sooner or later
        own = [
            itertools.takewhile(lambda word: word not in ("bash", "python"), call[1:])
            for call in calls
        ]
        return [
            [call[0], *options] if call[0] == "srun" else call
            for call, options in zip(calls, own, strict=True)
        ]

    @property
    def env(self) -> dict[str, str]:
        """The environment of the training."""
        lines = (self.place / "calls.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def play(tmp_path) -> Play:
    return Play(tmp_path)


def torchrun(first: str = "n1", gpus: int = 8) -> list[str]:
    """What starts a node's processes."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=77.0", f"--rdzv-endpoint={first}:10077"]
    nodes = ["--nnodes=2", f"--nproc-per-node={gpus}", "--max-restarts=0"]
    head = ["python", "-m", "trilane_engine.torchrun", "ranks/failures-77-0.json"]
    return [*head, *nodes, *rendezvous, "-m", "trilane_engine", "plan.json"]


def choice(gpus: int) -> list[str]:
    """What tests and chooses the nodes, of which two train."""
    return [*CHOICE, "--count", "2", "--test", "--gpus", str(gpus), "--"]


@pytest.mark.parametrize(
    ("name", "gpus", "threads", "first", "own", "modules"),
    [
        ("jean-zay-h100", 4, 24, "n1", [], ["purge", "load arch/h100"]),
        (
            "juwels-booster",
            4,
            12,
            "n1i",
            ["--cpu-bind=threads"],
            [],
        ),  # the node's name on InfiniBand
        ("perlmutter", 4, 16, "n1", [], ["load nccl"]),
    ],
)
def test_a_job_starts_one_launcher_a_node_with_a_process_for_each_gpu(
    name: str, gpus: int, threads: int, first: str, own: list[str], modules: list[str], play
):
    """What sites ask SLURM for is recorded."""
    assert play.run(recorded(name)[f"train-{name}.sbatch"]) == 0
    loads, step = [["module", *line.split()] for line in modules], [*SRUN, *own]
    wanted = [
        *loads,
        BEGIN,
        CORPUS,
        [*choice(gpus), *own],
        HOSTS,
        step,
        torchrun(first, gpus),
        [*END, "--code", "0"],
    ]
    assert play.calls == wanted
    env, is_offline = play.env, name in ("jean-zay-h100", "juwels-booster")
    given = {"OMP_NUM_THREADS": str(threads), "SRUN_CPUS_PER_TASK": "64", "NCCL_DEBUG": "WARN"}
    given |= {"HF_HUB_OFFLINE": "1" if is_offline else None}
    # on Slingshot NCCL needs a plug-in, or it falls back to TCP without a word
    given |= {"NCCL_NET": "AWS Libfabric" if name == "perlmutter" else None}
    assert {key: env.get(key) for key in given} == given
    assert env["TORCHELASTIC_ERROR_FILE"] == "ranks/error-77-0.json"


def test_a_training_that_fails_is_the_failure_of_its_job_and_one_with_nothing_to_do_starts_nothing(
    play,
):
    """Beyond some 300 nodes scontrol writes twice; whoever reads only the first line kills it, and
    so, by pipefail, the script.
    """
    assert play.run(recorded("generic")["train-generic.sbatch"], CODE="3", PAUSE_S="0.3") == 3
    assert play.calls[-1] == [*END, "--code", "3"]
    play.log.unlink()
    assert play.run(recorded("generic")["train-generic.sbatch"], BEGIN="stop: done") == 0
    assert play.calls == [BEGIN]


def test_of_a_job_with_spares_as_many_nodes_train_as_were_planned(play):
    text = recorded("jean-zay-a100")["train-everything-jean-zay-a100.sbatch"]
    assert play.run(text) == 0
    conda = [["conda", "shell.bash", "hook"], ["conda", "activate", "trilane"]]
    chosen = [
        *SRUN,
        "--nodes=2",
        "--nodelist=n[1-2]",
        "--ntasks=2",
    ]  # of the three that the job has
    begun = [["module", "purge"], ["module", "load", "arch/a100"], *conda, BEGIN, CORPUS, choice(8)]
    ended = [
        *END,
        "--code",
        "0",
        *choice(8)[-4:],
    ]  # a node may have failed: the test, with which it began, tells
    assert play.calls == [*begun, HOSTS, chosen, torchrun(), ended]


HOSTILE = ["a b", "$(id)", "`id`", "x;id", "x\n#SBATCH --time=9", "--uid=0", "x'y", 'x"y', "x&y"]
HOSTILE += ["${A}", "x\r", "x\\y", "~root", "\x00", "\u202ex", "x\x1b[2J"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "wish", ["account", "constraint", "qos", "partition", "reservation", "mail", "exclude"]
)
def test_a_value_that_bash_or_sbatch_would_read_twice_is_refused(wish: str, value: str):
    """In a constraint four signs have a meaning of SLURM's own, and no script gives it to bash
    without quotes.
    """
    if (wish, value) == ("constraint", "x&y"):
        return
    with pytest.raises(ValueError, match=f"^{wish}="):
        JobRequest(**{wish: value})


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_label_is_refused_and_a_hostile_path_is_quoted_never_executed(
    value: str, tmp_path
):
    site = sites.site("generic")
    with pytest.raises(ValueError, match=r"^label="):
        script.render("train", dataclasses.replace(plan_for(site), label=value), site, JobRequest())
    try:
        text = script.render(
            "train", plan_for(site), site, JobRequest(environment=f"/venvs/{value}")
        )
    except ValueError as refusal:
        assert str(refusal).startswith("environment=") and not value.isprintable()
        return
    line = next(line for line in text.splitlines() if line.startswith("VENV="))
    said = subprocess.run(
        ["bash", "-c", f'{line}; printf %s "$VENV"'], capture_output=True, text=True, cwd=tmp_path
    )
    assert (said.stdout, said.stderr, list(tmp_path.iterdir())) == (f"/venvs/{value}", "", [])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: JobRequest(time_limit="20h"), r"^time_limit='20h': must be \[DAYS-\]HH:MM:SS"),
        (lambda: JobRequest(time_limit="00:05:00"), "^signal_s=300: must be less than time_limit"),
        (lambda: render(spares=900), "^spares=900: jz-a100-80g has "),
        (lambda: render("trian"), "^template=trian: "),
        (
            lambda: render(topology=Topology(tp=4, dp=3, mbs=1, gbs=3)),
            "^tp x pp x dp=12: must fill whole nodes of 8",
        ),
    ],
)
def test_a_bad_wish_or_an_unknown_name_is_one_line(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def render(template: str = "train", topology: Topology | None = None, **wishes) -> str:
    site = sites.site("jean-zay-a100")
    p = plan_for(site)
    return script.render(
        template,
        dataclasses.replace(p, topology=topology or p.topology),
        site,
        JobRequest(**wishes),
    )
