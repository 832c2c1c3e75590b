"""The scripts: what they ask SLURM for and what they start, for every site and template; closed to hostile values."""

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import small_plan

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
    comment="for Ada (phase 2)",
    requeue=False,
    launcher="deepspeed",
    launch_blocking=True,
    nccl_debug="INFO",
    environment="conda:trilane",
    spares=1,
)


def plan_for(site: Site, nodes: int = 2) -> Plan:
    """A GPT of 1.3B over two whole nodes of that site."""
    nodes_of = cluster(site.cluster or "jz-a100-80g")
    topology = Topology(
        tp=nodes_of.gpus_per_node // 2, pp=2, dp=nodes, mbs=1, gbs=64, precision="fp16", recompute="full"
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
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "checkout", lambda: Path("/home/me/trilane"))


RECORDED = "jean-zay-a100"  # one text of each template is recorded; what the others mean is checked below


def test_one_script_of_each_template_is_the_recorded_one() -> None:
    assert {path.name: path.read_text() for path in GOLDEN.glob("*.sbatch")} == recorded(RECORDED)


def test_bash_and_shellcheck_accept_every_script(tmp_path: Path) -> None:
    paths = []
    for name in PRESETS:
        for file, text in recorded(name).items():
            paths.append(tmp_path / file)
            paths[-1].write_text(text)
            subprocess.run(["bash", "-n", paths[-1]], check=True)
    shellcheck = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1091", *paths]
    checked = subprocess.run(shellcheck, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


# GPUs and cores of a node, account, and the words that select it, as the sites' documentation has them, typed in here
NODES = {
    "generic": (8, 64, "xyz", "", ""),
    "jean-zay-a100": (8, 64, "xyz@a100", "a100", "arch/a100"),
    "jean-zay-h100": (4, 96, "xyz@h100", "h100", "arch/h100"),
    "jean-zay-v100-16g": (4, 40, "xyz@v100", "v100-16g", ""),
    "jean-zay-v100-32g": (4, 40, "xyz@v100", "v100-32g", ""),
    "juwels-booster": (4, 48, "xyz", "", ""),
    "leonardo": (4, 32, "xyz", "", ""),
    "marenostrum5-acc": (4, 80, "xyz", "", ""),
    "perlmutter": (4, 64, "xyz", "gpu&hbm40g", ""),
    "perlmutter-80g": (4, 64, "xyz", "gpu&hbm80g", ""),
}
ONLINE = ("generic", "perlmutter", "perlmutter-80g")  # whose compute nodes reach the internet
# further directives of a site's jobs on GPUs
FURTHER = {
    "juwels-booster": {"partition": "booster", "mem": "0"},
    "leonardo": {"partition": "boost_usr_prod"},
}

OF_SRUN = {"juwels-booster": ["--cpu-bind=threads"]}  # a site's own arguments of srun


def directives(text: str) -> dict[str, str]:
    """The options that sbatch reads: of the comments before the first command; none twice."""
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    options = [line.removeprefix("#SBATCH --").partition("=") for line in comments if line.startswith("#SBATCH")]
    assert len({name for name, _, _ in options}) == len(options)
    return {name: value for name, _, value in options}


def asked(template: str, name: str) -> dict[str, str]:
    """The options that this site's job of two nodes and two hours needs."""
    gpus, cores, account, constraint, _ = NODES[name]
    always = {"job-name": "gpt-1b3", "time": "02:00:00", "account": account}
    trains = {"open-mode": "append", "signal": "USR1@300", "requeue": ""}
    if template in ("monitor", "prepare"):  # a single core, where it costs nothing
        output = "watch-%j.out" if template == "monitor" else "prepare-%j.out"
        service = {"partition": "prepost"} if name.startswith("jean-zay") else {}
        one = {"nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "1", "output": output}
        return always | one | service
    tasks, threads = (gpus, cores // gpus) if template == "bench" else (1, cores)
    cards = {"gpus-per-node": str(gpus)} if name.startswith("perlmutter") else {"gres": f"gpu:{gpus}"}
    nodes = {"nodes": "2", "ntasks-per-node": str(tasks), "cpus-per-task": str(threads), **cards}
    there = FURTHER.get(name, {}) | ({"constraint": constraint} if constraint else {})
    there |= {} if name in ("generic", "leonardo", "marenostrum5-acc") else {"hint": "nomultithread"}
    more = {
        "train": {"output": "slurm-%j.out", **trains},
        "sweep": {"output": "slurm-%A_%a.out", "array": "1%4", **trains},
    }
    return always | nodes | there | more.get(template, {"output": "slurm-%j.out"})


@pytest.mark.parametrize("name", PRESETS)
def test_a_script_asks_slurm_for_what_plan_and_site_need(name: str) -> None:
    texts = recorded(name)
    for template in script.NAMES:
        assert directives(texts[f"{template}-{name}.sbatch"]) == asked(template, name), template


def test_all_that_may_be_wished_is_asked_of_slurm() -> None:
    wished = {
        **{"time": "1-12:00:00", "qos": "qos_gpu_a100-t3", "partition": "gpu_p5", "constraint": "a100"},
        **{"reservation": "hug", "exclude": "jean-zay-iam[01-03],jean-zay-iam11", "mail-user": "me@example.org"},
        **{"comment": '"for Ada (phase 2)"'},
        **{"mail-type": "END,FAIL,REQUEUE,TIME_LIMIT_80", "no-requeue": "", "nodes": "3", "no-kill": ""},
    }
    plain = asked("train", "jean-zay-a100")
    del plain["requeue"]
    assert directives(recorded("jean-zay-a100")["train-everything-jean-zay-a100.sbatch"]) == plain | wished


# What a script calls, by name and arguments, one line a call; srun goes on with its command, as on the first node.
CALLED = r"""#!/bin/bash
printf '%q ' "${0##*/}" "$@" >>"$CALLS"; echo >>"$CALLS"
case "${0##*/} $*" in
srun*) while [[ $1 == -* ]]; do shift; done; exec "$@" ;;
scontrol*) echo n1; sleep "${PAUSE_S:-0}"; echo n2 ;;
*'job nodes .'*) echo 'n[1-2]' ;;
*'job begin .') echo "${BEGIN:-go: from the beginning}" ;;
*engine.torchrun* | deepspeed* | *slurm\ watch*) env >"$CALLS.env"; exit "${CODE:-0}" ;;
esac
"""
SRUN = ["srun", "--kill-on-bad-exit=1", "--wait=60"]
CORPUS = ["python", "-m", "trilane.engine.data.corpus", "--in-job", "plan.json"]
BEGIN, CHOICE, END = (["python", "-m", "trilane", "slurm", "job", word, "."] for word in ("begin", "nodes", "end"))
HOSTS = ["scontrol", "show", "hostnames", "n[1-2]"]


class Play:
    """A script run by bash as on the first of its two nodes, its commands being ones that only note their arguments."""

    def __init__(self, place: Path) -> None:
        self.place, self.log, self.errors = place, place / "calls", ""
        (place / "bin").mkdir()
        (place / "bin/activate").touch()
        for name in ("python", "srun", "scontrol", "sbatch", "salloc", "nvidia-smi", "deepspeed", "conda"):
            (place / "bin" / name).write_text(CALLED)
            (place / "bin" / name).chmod(0o755)

    def run(self, text: str, *arguments: str, **more: str) -> int:
        """The script's exit code; it prints no errors unless it has arguments."""
        job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
        more = {**job, "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "64", "SLURM_ARRAY_TASK_ID": "2", **more}
        module = {"BASH_FUNC_module%%": '() { echo "module $*" >>"$CALLS"; }'}
        path = f"{self.place / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "CALLS": str(self.log), "TRILANE_VENV": str(self.place), **module, **more}
        (self.place / "job.sbatch").write_text(text)
        done = subprocess.run(
            ["bash", "job.sbatch", *arguments], cwd=self.place, env=env, capture_output=True, text=True
        )
        self.errors = done.stderr
        assert arguments or not done.stderr, done.stderr
        return done.returncode

    @property
    def calls(self) -> list[list[str]]:
        """What was called, with its arguments; of srun only its own options."""
        calls = [shlex.split(line) for line in self.log.read_text().splitlines()]
        calls = [call for call in calls if "guard" not in call]  # which runs besides, sooner or later
        own = [itertools.takewhile(lambda word: word not in ("bash", "python"), call[1:]) for call in calls]
        return [[call[0], *options] if call[0] == "srun" else call for call, options in zip(calls, own, strict=True)]

    @property
    def env(self) -> dict[str, str]:
        """The environment of the training."""
        lines = (self.place / "calls.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def torchrun(name: str, start: int = 0) -> list[str]:
    """What starts a node's processes; each start of a job has a port and an id of its own."""
    first = "n1i" if name == "juwels-booster" else "n1"  # its name on InfiniBand
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-id=77.{start}", f"--rdzv-endpoint={first}:{10077 + 1000 * start}"]
    nodes = ["--nnodes=2", f"--nproc-per-node={NODES[name][0]}", "--max-restarts=0"]
    head = ["python", "-m", "trilane.engine.torchrun", "ranks/failures-77-0.json"]
    return [*head, *nodes, *rendezvous, "-m", "trilane.engine", "plan.json"]


def choice(gpus: int) -> list[str]:
    """What tests and chooses the nodes, of which two train."""
    return [*CHOICE, "--count", "2", "--test", "--gpus", str(gpus), "--"]


def loads(name: str) -> list[list[str]]:
    modules, plug_in = NODES[name][-1], [["module", "load", "nccl"]] * name.startswith("perlmutter")
    return plug_in + ([["module", "purge"], ["module", "load", modules]] if modules else [])


@pytest.mark.parametrize("template", ["train", "sweep"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_job_starts_one_launcher_a_node_with_a_process_for_each_gpu(name: str, template: str, play: Play) -> None:
    """A sweep's job does so in the folder that its line of runs.txt names."""
    gpus, cores = NODES[name][:2]
    (play.place / "runs/two").mkdir(parents=True)
    (play.place / "runs.txt").write_text("runs/one\nruns/two\n")
    assert play.run(recorded(name)[f"{template}-{name}.sbatch"]) == 0
    own = OF_SRUN.get(name, [])
    nodes, step = [*choice(gpus), *own], [*SRUN, *own]
    wanted = [*loads(name), BEGIN, CORPUS, nodes, HOSTS, step, torchrun(name), [*END, "--code", "0"]]
    assert play.calls == wanted
    env = play.env
    assert env["PWD"] == str(play.place / ("runs/two" if template == "sweep" else ""))
    given = {"OMP_NUM_THREADS": str(cores // gpus), "SRUN_CPUS_PER_TASK": "64", "NCCL_DEBUG": "WARN"}
    offline = dict.fromkeys(["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"], "1")
    given |= {"WANDB_MODE": "offline", **offline} if name not in ONLINE else {}
    given |= {"TRILANE_SWEEP": str(play.place)} if template == "sweep" else {}
    assert {key: env.get(key) for key in given} == given
    assert ("HF_HUB_OFFLINE" in env, "CUDA_LAUNCH_BLOCKING" in env) == (name not in ONLINE, False)
    assert env["TORCHELASTIC_ERROR_FILE"] == "ranks/error-77-0.json"
    # on Slingshot NCCL needs a plug-in, or it falls back to TCP without a word
    assert env.get("NCCL_NET") == ("AWS Libfabric" if name.startswith("perlmutter") else None)


def test_a_part_of_a_node_gets_that_part_of_its_cores_and_no_more_threads(play: Play) -> None:
    """Two of eight GPUs: a quarter of 64 cores, and half of that for each process."""
    site = sites.site("jean-zay-a100")
    two = dataclasses.replace(plan_for(site), topology=Topology(tp=2, dp=1, mbs=1, gbs=1, precision="fp16"))
    text = script.render("train", two, site, JobRequest())
    assert (directives(text)["cpus-per-task"], directives(text)["gres"]) == ("16", "gpu:2")
    assert play.run(text) == 0 and play.env["OMP_NUM_THREADS"] == "8"


def test_a_training_that_fails_is_the_failure_of_its_job(play: Play) -> None:
    assert play.run(recorded("generic")["train-generic.sbatch"], CODE="3") == 3
    assert play.calls[-1] == [*END, "--code", "3"]


def test_a_list_of_nodes_that_comes_in_pieces_ends_no_job(play: Play) -> None:
    """Beyond some 300 nodes scontrol writes twice; whoever reads only the first line kills it, and so, by pipefail, the
    script."""
    assert play.run(recorded("generic")["train-generic.sbatch"], PAUSE_S="0.3") == 0


def test_the_processes_meet_on_the_first_of_the_nodes_that_train(play: Play) -> None:
    """A spare stays out, or has taken the place of a node that died."""
    text = recorded("generic")["train-generic.sbatch"]
    spare = "TRAIN_NODES=1 TRAIN_NODELIST=n2\nmeet\nmeet\n"
    assert play.run(text.replace("  meet\n  echo", f"{spare}echo")) == 0
    assert [call for call in play.calls if call[0] == "scontrol"] == [["scontrol", "show", "hostnames", "n2"]] * 2
    (started,) = [call for call in play.calls if "trilane.engine.torchrun" in call]
    assert {"--nnodes=1", "--rdzv-id=77.1", "--rdzv-endpoint=n1:11077"} <= set(started)


def test_a_job_with_nothing_to_do_starts_nothing(play: Play) -> None:
    assert play.run(recorded("generic")["train-generic.sbatch"], BEGIN="stop: done") == 0
    assert play.calls == [BEGIN]


def test_deepspeeds_launcher_gets_the_nodes_from_a_hostfile(play: Play) -> None:
    assert play.run(recorded("jean-zay-a100")["train-everything-jean-zay-a100.sbatch"]) == 0
    hostfile = play.place / "ranks/hostfile-77"
    assert hostfile.read_text() == "n1 slots=8\nn2 slots=8\n"
    nodes = [f"--hostfile={hostfile}", "--node_rank=0", "--master_addr=n1", "--master_port=10077", "--no_local_rank"]
    start = ["deepspeed", "--no_ssh", *nodes, "--module", "trilane.engine", "plan.json"]
    conda = [["conda", "shell.bash", "hook"], ["conda", "activate", "trilane"]]
    chosen = [*SRUN, "--nodes=2", "--nodelist=n[1-2]", "--ntasks=2"]  # of the three that the job has
    begun = [*loads("jean-zay-a100"), *conda, BEGIN, CORPUS, choice(8)]
    ended = [*END, "--code", "0", *choice(8)[-4:]]  # a node may have failed: the test, with which it began, tells
    calls = [*begun, HOSTS, HOSTS, chosen, start, ended]
    assert play.calls == calls
    assert (play.env["CUDA_LAUNCH_BLOCKING"], play.env["NCCL_DEBUG"]) == ("1", "INFO")


@pytest.mark.parametrize("name", PRESETS)
def test_a_benchmark_names_every_gpu_then_measures_with_one_task_each(name: str, play: Play) -> None:
    assert play.run(recorded(name)[f"bench-{name}.sbatch"]) == 0
    own = OF_SRUN.get(name, [])
    first = [*SRUN, "--ntasks=2", "--ntasks-per-node=1", *own]
    measure = ["python", "-m", "trilane", "measure", "machine", "cluster-77.json"]
    assert play.calls == [*loads(name), HOSTS, first, ["nvidia-smi", "-L"], [*SRUN, *own], measure]


@pytest.mark.parametrize("code", ["0", "1", "75"])
def test_a_watching_job_submits_itself_again_only_while_runs_go_on(code: str, play: Play) -> None:
    assert play.run(recorded("generic")["monitor-generic.sbatch"], CODE=code) == 0
    watch = ["python", "-m", "trilane", "slurm", "watch", ".", "--every", "60", "--seconds", str(7200 - 120)]
    assert play.calls == [watch, *([["sbatch", "monitor.sbatch"]] if code == "75" else [])]


@pytest.mark.parametrize("name", PRESETS)
def test_the_interactive_script_asks_for_the_same_nodes_with_a_shell(name: str, play: Play) -> None:
    text = recorded(name)[f"interactive-{name}.sbatch"]
    play.run(text, SLURM_JOB_ID="")
    ((command, *options, shell, rcfile, path),) = play.calls
    wanted = {k: v for k, v in asked("interactive", name).items() if k != "output"}
    assert dict(option[2:].split("=", 1) for option in options) == wanted
    assert (command, shell, rcfile, path) == ("salloc", "bash", "--rcfile", "job.sbatch")
    play.log.unlink()
    assert play.run(text.partition("if [[ $- != *i* ]]")[0] + "train") == 0
    assert play.calls[-2:] == [[*SRUN, *OF_SRUN.get(name, [])], torchrun(name, start=1)]


@pytest.mark.parametrize("wish", [f.name for f in dataclasses.fields(JobRequest)])
def test_every_wish_changes_a_script(wish: str) -> None:
    """A wish that no template has a place for would be lost without a word."""
    site, plan = sites.site("generic"), plan_for(sites.site("generic"))
    changed = {"signal_s": 60, "parallel": 2, "exclude": "n1", "preflight": False}.get(wish, getattr(EVERYTHING, wish))
    one = dataclasses.replace(JobRequest(), **{wish: changed})
    texts = [[script.render(t, plan, site, r) for t in ("train", "sweep")] for r in (JobRequest(), one)]
    assert texts[0] != texts[1]


def test_the_marks_stand_around_what_was_filled_in_and_nothing_else() -> None:
    site = sites.site("jean-zay-a100")
    marked = script.render("train", plan_for(site), site, EVERYTHING, marked=True)
    plain = script.render("train", plan_for(site), site, EVERYTHING)
    assert marked.replace(script.OPEN, "").replace(script.CLOSE, "") == plain
    assert f"--account={script.OPEN}xyz@a100{script.CLOSE}" in marked
    shown = script.as_html(marked)
    assert shown.count("<mark") == marked.count(script.OPEN)
    assert "&amp;1" in shown and script.OPEN not in shown


HOSTILE = [
    *("a b", "$(id)", "`id`", "x;id", "x\n#SBATCH --time=9", "-x", "--uid=0", "x'y", 'x"y', "x|y", "x&y", "${A}"),
    *("é", "数", "x\ty", "x\r", "x\\y", "x>y", "x<y", "x*", "x?", "~root", "!x", "#x", "x{a,b}", "x(y)", "\x00"),
    *("x\u2028y", "\u202ex", "x\u00a0y", "$IFS", "x\x1b[2J"),
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("wish", ["account", "constraint", "qos", "partition", "reservation", "mail", "exclude"])
def test_a_value_that_bash_or_sbatch_would_read_twice_is_refused(wish: str, value: str) -> None:
    """In a constraint four signs have a meaning of SLURM's own, and no script gives it to bash without quotes."""
    if wish == "constraint" and value in ("x|y", "x&y", "x*", "x(y)"):
        assert JobRequest(constraint=value).constraint == value
        return
    with pytest.raises(ValueError, match=f"^{wish}="):
        JobRequest(**{wish: value})


@pytest.mark.parametrize("wanted", ["a100", "gpu&hbm80g", "[rack1|rack2]", "(v100|a100)&nvme", "rack1*2&gpu"])
def test_a_constraint_may_combine_features(wanted: str) -> None:
    """As NERSC's documentation asks for its nodes of 80 GB."""
    site = sites.site("generic")
    text = script.render("train", plan_for(site), site, JobRequest(constraint=wanted))
    assert directives(text)["constraint"] == wanted


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_label_is_refused_and_a_hostile_path_is_quoted_never_executed(value: str, tmp_path: Path) -> None:
    site = sites.site("generic")
    with pytest.raises(ValueError, match=r"^label="):
        script.render("train", dataclasses.replace(plan_for(site), label=value), site, JobRequest())
    try:
        text = script.render("train", plan_for(site), site, JobRequest(environment=f"/venvs/{value}"))
    except ValueError as refusal:
        assert str(refusal).startswith("environment=") and not value.isprintable()
        return
    line = next(line for line in text.splitlines() if line.startswith("VENV="))
    said = subprocess.run(["bash", "-c", f'{line}; printf %s "$VENV"'], capture_output=True, text=True, cwd=tmp_path)
    assert (said.stdout, said.stderr, list(tmp_path.iterdir())) == (f"/venvs/{value}", "", [])


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"time_limit": "20h"}, r"^time_limit='20h': must be \[DAYS-\]HH:MM:SS"),
        ({"time_limit": "00:00:30"}, r"^time_limit=00:00:30: must be a minute or more$"),
        ({"time_limit": "00:05:00", "signal_s": 300}, r"^signal_s=300: must be less than time_limit=00:05:00$"),
        ({"launcher": "mpirun"}, r"^launcher=mpirun: did you mean srun\? known: deepspeed, srun, torchrun$"),
        ({"parallel": 0}, r"^parallel=0: must be a whole number of at least 1$"),
        ({"spares": -1}, r"^spares=-1: must be a whole number of at least 0$"),
        ({"nccl_debug": "info"}, r"^nccl_debug=info: .*known: INFO"),
    ],
)
def test_a_bad_wish_is_one_line(wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobRequest(**wishes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sites.site("jean-zay-a10"), r"^site=jean-zay-a10: did you mean jean-zay-a100\? known: generic"),
        (lambda: sites.site("nowhere.json"), r"^site=nowhere.json: no such file$"),
        (lambda: render(partition="gpu_p4"), r"^partition=gpu_p4: did you mean gpu_p5\? known: gpu_p5, prepost$"),
        (lambda: render(spares=3), r"^spares=3: must be at most the nodes that train \(2\)$"),
        (lambda: render("bench", spares=1), r"^spares=1: template bench does not use it$"),
        (lambda: render("trian"), r"^template=trian: did you mean train\?"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def render(template: str = "train", **wishes) -> str:
    site = sites.site("jean-zay-a100")
    return script.render(template, plan_for(site), site, JobRequest(**wishes))


def test_gpus_that_do_not_fill_their_nodes_are_refused() -> None:
    site = sites.site("jean-zay-a100")
    plan = dataclasses.replace(plan_for(site), topology=Topology(tp=4, dp=3, mbs=1, gbs=3))
    with pytest.raises(ValueError, match=r"^tp x pp x dp=12: must fill whole nodes of 8 GPUs$"):
        script.render("train", plan, site, JobRequest())


def test_a_site_of_ones_own_is_one_json_file_and_its_cluster_may_lie_beside_it(tmp_path: Path) -> None:
    from trilane.utils.validation import to_mapping

    (tmp_path / "nodes.json").write_text(json.dumps(to_mapping(small_plan().cluster)))
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine", "cluster": "nodes.json", "partition": "long"}))
    text = script.render("train", small_plan(), sites.site(str(tmp_path / "mine.json")), JobRequest())
    assert "#SBATCH --partition=long\n" in text and "--gres" not in text


@pytest.mark.parametrize("name", sites.catalogue())
def test_every_number_of_a_shipped_site_has_its_source(name: str) -> None:
    site = sites.site(name)
    told = " ".join(site.sources)
    assert site.sources and ("all" in told or all(word in told for word in ("constraint", "qos", "modules", "offline")))
    assert site.name == name
