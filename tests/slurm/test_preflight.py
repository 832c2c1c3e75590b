"""The guard refuses what would be paid for in GPU hours: each rule, with its remedy."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.predict import predict
from trilane.slurm import checks, client, preflight
from trilane.slurm.checks import REFUSAL, WARNING, JobCheck
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, seconds_of, site
from trilane.utils.validation import to_mapping
from trilane.workspace.checkpoints import name_of, write_manifest
from trilane.workspace.status import RunStatus, write_status

A100, V100 = site("jean-zay-a100"), site("jean-zay-v100-32g")
A100_80G, AVAILABLE = cluster("jz-a100-80g"), checks.available


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that counts as shared, on a login node whose SLURM accepts all, with a torch that fits an A100."""
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "require_answer", lambda: None)
    monkeypatch.setattr(client, "test_only", lambda script: "")
    monkeypatch.setattr(checks, "available", lambda _: (1e15, 1e9))
    torch(tmp_path, "2.13.0+cu130", "13.0")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def torch(tmp_path: Path, version: str, cuda: str | None) -> None:
    place = tmp_path / "venv/lib/python3.11/site-packages/torch"
    place.mkdir(parents=True, exist_ok=True)
    cuda_line = f"cuda: Optional[str] = {cuda!r}\n"
    (place / "version.py").write_text(f"__version__ = '{version}'\n{cuda_line}hip: Optional[str] = None\n")


def plan(place: str = "jz-a100-80g", **changes: Any) -> Plan:
    """1.3B on two nodes of eight A100, 4,000 iterations, a checkpoint every 500."""
    topology = {"tp": 2, "pp": 2, "dp": 4, "mbs": 4, "gbs": 512, "precision": "bf16", "recompute": "full"}
    topology |= changes.pop("topology", {})
    run = Run(train_iters=changes.pop("train_iters", 4_000), **{"save_interval": 500, **changes.pop("run", {})})
    shape = parse_shape(changes.pop("shape", "24,2048,16,2048,50304"))
    data = Data(**{"source": "stdlib", "folder": "/shared/data", **changes.pop("data", {})})
    return Plan(
        label="gpt", shape=shape, cluster=cluster(place), topology=Topology(**topology), data=data, run=run, **changes
    )


def findings(folder: Path, p: Plan, where=A100, script: Callable[[str], str] | None = None, allow=(), **wishes):
    venv = str(folder.parent / "venv")
    request = JobRequest(
        **{"account": f"xyz{where.account_ending}", "time_limit": "20:00:00", "environment": venv} | wishes
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


def test_off_the_cluster_all_that_this_machine_lacks_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "is_installed", lambda: False)
    monkeypatch.setattr(checks, "available", lambda _: (0, 0))
    torch(folder.parent, "2.13.0+cpu", None)
    p = replace(good(folder), data=Data(source="/gpfs/corpus"))
    found = findings(folder, p, replace(A100, local=(str(folder.parent),)))
    assert [(f.level, f.rule) for f in found] == [(WARNING, "sbatch")]
    assert all(word in found[0].message for word in ("wheel", "data", "disk", "inodes"))


@pytest.mark.parametrize(
    ("tokens", "changes", "rule", "says"),
    [
        (10**10, {"train_iters": 50}, "tokens", "a benchmark"),
        (10**10, {"train_iters": 1100}, "tokens", "no published training has so few"),
        (10**8, {}, "epochs", "44 epochs"),
        (10**10, {"optimizer": Optimizer(lr=1e-3)}, "learning rate", "have used 2.0e-04 to 3.0e-04"),
        (10**10, {"optimizer": Optimizer(lr=6e-5, min_lr=0.0)}, "learning rate", "GPT-3"),
    ],
)
def test_what_makes_no_sense_for_the_size_of_the_model_is_named(
    tokens: int, changes: dict, rule: str, says: str, folder: Path
) -> None:
    """One line about a benchmark, whatever its corpus and learning rate are."""
    (found,) = findings(folder, good(folder, tokens, **changes))
    assert (found.level, found.rule) == (WARNING, rule) and says in found.message


def test_the_known_learning_rates_are_those_of_published_trainings() -> None:
    lowest, highest = zip(*map(checks.known_rates, (1e6, 1.3e9, 47e9, 175e9, 1e12)), strict=True)
    assert lowest == pytest.approx([6e-4, 2e-4, 8e-5, 6e-5, 6e-5], rel=0.05)
    assert checks.known_rates(7e9)[1] == pytest.approx(3e-4)  # LLaMA 7B
    assert highest[0] == 6e-4


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


def test_what_was_measured_in_the_folder_takes_the_place_of_the_prediction(folder: Path) -> None:
    """Earlier saves of 400 s, iterations of 20 s and an evaluation of ten batches: 470 s."""
    p = long(folder, run={"eval_interval": 100, "eval_iters": 10})
    (folder / "plan.json").write_text(json.dumps(p.to_json()))
    steps = [{"iteration": n, "sec_per_it": 20.0, "global_batch_size": 512, "lm_loss": 5.0} for n in range(1, 41)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    saved = "saved checkpoints/iter_0000020 (15800.0 MB in 400.00 s, training stopped for 9.00 s)\n"
    (folder / "run.log").write_text("START\n" + saved)
    (found,) = (f for f in findings(folder, p, allow=["run folder"]) if f.rule == "signal")
    assert found.level == REFUSAL and found.remedy == "--signal-s 720", found.message
    assert "70 s of an iteration and an evaluation, 400 s of a save, measured" in found.message


def test_evaluations_are_in_the_time_of_the_job(folder: Path) -> None:
    """19 hours of iterations end in time; with an evaluation of 50 batches every 100, a quarter each, they do not."""
    count = int(19 * 3600 / predict(plan()).sec_per_it)
    for run, late in (({}, False), ({"eval_interval": 100, "eval_iters": 50}, True)):
        found = findings(folder, good(folder, 10**11, train_iters=count, run=run))
        assert ("time" in rules(found)) is late


def test_a_limit_that_holds_no_start_and_save_is_named(folder: Path) -> None:
    found = [f for f in findings(folder, long(folder), time_limit="00:20:00") if "hold no start" in f.message]
    assert [(f.level, f.rule) for f in found] == [(WARNING, "time")]


@pytest.mark.parametrize(("save_s", "levels"), [(0, [WARNING]), (600, []), (3600, []), (20, [WARNING])])
def test_an_interval_far_from_dalys_is_named_with_his(save_s: int, levels: list[str], folder: Path) -> None:
    """Two nodes fail every 316 h and save in 8 s: 71 minutes. Every 20 s, two fifths of the time are lost."""
    interval = round(save_s / predict(plan()).sec_per_it)
    p = good(folder, 10**10, train_iters=9000, run={"save_interval": interval})
    found = [f for f in findings(folder, p) if f.rule == "checkpoints"]
    assert [f.level for f in found] == levels
    if found:
        at = int(re.findall(r"save_interval=(\d+)", found[0].remedy)[0]) * predict(plan()).sec_per_it
        assert at == pytest.approx(71 * 60, rel=0.02)


LACKING = {
    "no GPU is asked for": ("#SBATCH --gres=gpu:8\n", REFUSAL),
    "--nodes=2 is missing": ("#SBATCH --nodes=2\n", REFUSAL),
    "--constraint=a100 is missing": ("#SBATCH --constraint=a100\n", REFUSAL),
    "--cpus-per-task is missing": ("#SBATCH --cpus-per-task=64\n", WARNING),
}


@pytest.mark.parametrize("says", LACKING)
def test_a_script_that_lacks_what_its_site_needs_is_named(says: str, folder: Path) -> None:
    line, level = LACKING[says]
    found = [
        f for f in findings(folder, good(folder, 10**10), script=lambda s: s.replace(line, "")) if f.rule == "script"
    ]
    assert [f.level for f in found] == [level] and found[0].message.startswith(says)
    tasks = findings(folder, good(folder, 10**10), script=lambda s: s.replace(line, line + "#SBATCH --ntasks=16\n"))
    assert "--ntasks=16: the plan's 16 GPUs need 2" in [f.message for f in tasks]


V100_PLAN = {"place": "jz-v100-32g", "topology": {"precision": "fp16"}, "train_iters": 100}
REFUSED = {
    "cluster": (plan(), V100, "planned for 8 x A100-80GB a node, but jean-zay-v100-32g has 4 x V100-32GB", {}),
    "precision": (plan(), V100, "V100-32GB has no bf16", {}),
    "tp": (
        plan(**V100_PLAN | {"topology": {"precision": "fp16", "tp": 8, "pp": 1, "dp": 2}}),
        V100,
        "a tensor-parallel group must stay inside a node of 4 GPUs",
        {},
    ),
    "wheel": (
        plan(**V100_PLAN),
        V100,
        "torch 2.13.0+cu130 is built for CUDA 13.0: no kernels for V100-32GB (sm_70)",
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
    "time": (plan(run={"exit_duration_minutes": 1205.0}), A100, "is beyond the limit of 1200 minutes", {}),
    "data": (plan(data={"source": "/shared/nothing"}), A100, "/shared/nothing: no such file, folder or", {}),
    "internet": (plan(data={"tokenizer": "gpt2"}), A100, "tokenizer gpt2 is not a folder here", {}),
    "partition": (plan(), A100, "did you mean gpu_p5", {"partition": "gpu_p4"}),
    "label": (replace(plan(), label="$(id)"), A100, "must consist of letters", {}),
}


def test_spare_nodes_have_their_price_and_their_limits(folder: Path) -> None:
    (found,) = [f for f in findings(folder, plan(), spares=1) if f.rule == "spares"]
    assert (found.level, "1 of 3 nodes stand by: 160 of the 480 GPU-hours" in found.message) == (WARNING, True)
    (found,) = [f for f in findings(folder, plan(), spares=3) if f.rule == "spares"]
    assert (found.level, found.message) == (REFUSAL, "spares=3: must be at most the nodes that train (2)")
    few = str(folder.parent / "few.json")
    Path(few).write_text(json.dumps(to_mapping(replace(cluster("jz-a100-80g"), max_nodes=2))))
    (found,) = [f for f in findings(folder, plan(), replace(A100, cluster=few), spares=1) if f.rule == "spares"]
    assert found.message.startswith("spares=1: must be at most 0: ") and found.level == REFUSAL
    written = [f.message for f in findings(folder, plan(), script=lambda text: text, spares=2) if f.rule == "script"]
    assert written == []
    later = findings(folder, plan(), spares=1)
    assert any("--spares 1 is requested, job.sbatch has 2" in f.message for f in later)


@pytest.mark.parametrize("rule", REFUSED)
def test_it_is_refused_with_rule_and_remedy(rule: str, folder: Path) -> None:
    p, where, says, wishes = REFUSED[rule]
    found = next(f for f in findings(folder, p, where, **wishes) if f.rule == rule)
    assert found.level == REFUSAL and says in found.message and len(found.remedy) > 5


def test_one_task_for_each_gpu_is_what_its_script_needs_and_the_signal_reaches_it(folder: Path) -> None:
    plain = {f.rule for f in findings(folder, plan())}
    assert {f.rule for f in findings(folder, plan(), launcher="srun", script=lambda s: s)} == plain
    one = lambda s: s.replace("--ntasks-per-node=8", "--ntasks-per-node=1")  # noqa: E731
    found = preflight.refused(findings(folder, plan(), launcher="srun", script=one))
    assert [f.message for f in found] == ["--ntasks-per-node=1: the plan's 16 GPUs need 8"]


def test_a_qos_that_the_site_does_not_list_is_a_warning_that_names_what_is_unknown(folder: Path) -> None:
    found = [f for f in findings(folder, plan(), qos="qos_gpu_a100-t2") if f.rule.startswith("qos")]
    assert [(f.level, f.rule) for f in found] == [(WARNING, "qos")]
    assert "did you mean qos_gpu_a100-t3" in found[0].message and "most GPUs are unknown" in found[0].message


def test_a_container_that_is_missing_is_refused_where_it_could_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cluster; elsewhere it may be there. pyxis mounts what the site names, and nothing else."""
    where = replace(A100, container="pyxis", container_image="/images/torch.sqsh", container_mounts=("/shared",))
    every = {f.rule: f for f in findings(folder, plan(), where)}
    assert every["container"].level == REFUSAL and every["wheel"].message.startswith("torch is the container's")
    assert every["container"].message == "container_image=/images/torch.sqsh: no such file"
    monkeypatch.setattr(client, "is_installed", lambda: False)
    (here,) = (f for f in findings(folder, plan(), where) if f.rule in ("sbatch", "container"))
    assert here.level == WARNING and "container" in here.message
    monkeypatch.setattr(client, "is_installed", lambda: True)
    elsewhere = plan(data={"folder": "/elsewhere"})
    found = [f for f in findings(folder, elsewhere, where) if f.rule == "container"]
    assert [f.level for f in found] == [REFUSAL, WARNING] and found[1].message.startswith(
        "data.folder=/elsewhere is in"
    )


def test_a_setup_line_that_bash_cannot_parse_is_refused_with_its_number(folder: Path) -> None:
    found = [f for f in findings(folder, plan(), replace(A100, setup=("true", "if ["))) if f.rule == "bash"]
    assert found[0].level == REFUSAL and found[0].message.startswith("site.setup, line 2: bash: ")


def test_the_copy_that_a_save_is_written_from_must_fit_into_the_node(folder: Path) -> None:
    """12 bytes a parameter, 2.1 TB on one node with 176B; a run that never saves has none."""
    big = plan(shape="70,14336,112,2048,50304", topology={"tp": 8, "pp": 1, "dp": 1})
    big, never = (replace(big, run=replace(big.run, save_interval=n)) for n in (100, 0))
    said = [[f.message for f in findings(folder, p, A100) if f.rule == "host memory"] for p in (big, never)]
    assert said[0][0].startswith("a save's copy, with the offload, takes 2081 GB") and not said[1]


EDITED = {
    "kill-on-bad-exit": (lambda s: s.replace("--kill-on-bad-exit=1 ", ""), "the others wait until the time limit"),
    "pipefail": (lambda s: s.replace("set -euo pipefail", "set -eu"), "a failed run counts as COMPLETED"),
    "signal": (
        lambda s: s.replace("trilane.engine.torchrun", "torch.distributed.run"),
        "SIGUSR1 before the limit may reach only the launcher",
    ),
    "script": (lambda s: s.replace("--nodes=2", "--nodes=3"), "--nodes=3: the plan's 16 GPUs need 2"),
    "internet": (lambda s: s + "pip install flash-attn\n", "the script has: pip install"),
    "bash": (lambda s: s + "if true; then\n", "syntax error"),
}


@pytest.mark.parametrize("rule", EDITED)
def test_a_script_edited_into_a_trap_is_refused(rule: str, folder: Path) -> None:
    edit, says = EDITED[rule]
    found = next(f for f in findings(folder, plan(), script=edit) if f.rule == rule)
    assert found.level == REFUSAL and says in found.message


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        (
            "port",
            lambda s: s.replace("MASTER_PORT=$((10000 + (SLURM_JOB_ID + 1000 * STARTS) % 20000))", "MASTER_PORT=29500"),
        ),
        ("error file", lambda s: s.replace("-$SLURM_NODEID.json", ".json")),
        ("internet", lambda s: s.replace("HF_HUB_OFFLINE=1 ", "")),
        ("script", lambda s: s.replace("slurm-%j.out", "slurm-%A_%a.out")),
    ],
)
def test_what_is_only_likely_to_go_wrong_is_a_warning(rule: str, edit: Callable[[str], str], folder: Path) -> None:
    assert next(f.level for f in findings(folder, plan(), script=edit) if f.rule == rule) == WARNING


def test_a_wish_that_the_folders_script_does_not_hold_is_refused(folder: Path) -> None:
    found = findings(folder, plan(), script=lambda s: s.replace("xyz@a100", "abc@a100"))
    wanted = "--account xyz@a100 is requested, job.sbatch has abc@a100"
    assert wanted in [f.message for f in found if f.rule == "script" and f.level == REFUSAL]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("--time=20:00:00", "--time=1200", ""),
        ("--time=20:00:00", "--time 20:00:00", ""),
        ("--time=20:00:00", "-t 0-20", ""),
        ("--time=20:00:00", "--time=1200:00  # twenty hours", ""),
        ("--time=20:00:00", "-t100:00:00", "--time 20:00:00 is requested, job.sbatch has 100:00:00"),
        ("--time=20:00:00", "--time=20h", "time_limit='20h': must be a time in a form of sbatch"),
        ("--account=xyz@a100", "-A xyz@a100", ""),
        ("--account=xyz@a100", "-A abc@a100", "--account xyz@a100 is requested, job.sbatch has abc@a100"),
        ("--gres=gpu:8", "--gres=gpu:a100:8", ""),
        ("--gres=gpu:8", "--gpus-per-node=a100:8", ""),
        ("--gres=gpu:8", "--gpus-per-node=4", "--gpus-per-node=4: the plan's 16 GPUs need 8"),
        ("--gres=gpu:8", "--gres=gpu:a100:4", "--gres=gpu:a100:4: the plan's 16 GPUs need gpu:8"),
        ("--nodes=2\n#SBATCH ", "--nodes=2 ", ""),
        ("--nodes=2", "--nodes=2-2 # two", ""),
        ("--nodes=2", "-N 2 # and not --nodes=3", ""),
        ("--nodes=2", "-N 3", "--nodes=3: the plan's 16 GPUs need 2"),
        ("--nodes=2", "--nodes=2 --comment='two", "#SBATCH --nodes=2 --comment='two: cannot be read: No closing"),
        ("set -euo pipefail", "set -euo pipefail\n#SBATCH --nodes=3", ""),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(old: str, new: str, says: str, folder: Path) -> None:
    """man sbatch: one-letter names, the value behind a space, five forms of a time; no options after a command."""
    found = preflight.refused(findings(folder, plan(), script=lambda s: s.replace(old, new, 1)))
    assert any(says in f.message for f in found) if says else not found


@pytest.mark.parametrize(
    ("time_limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:02:03", 3723), ("1-2", 93600), ("1-2:3", 93780), ("1-02:03:04", 93784)],
)
def test_a_time_means_what_it_means_to_sbatch(time_limit: str, seconds: int) -> None:
    assert seconds_of(time_limit) == seconds


@pytest.mark.parametrize("unlimited", ["0", "00:00:00", "UNLIMITED", "infinite"])
def test_a_script_edited_to_have_no_time_limit_is_checked_as_such(unlimited: str, folder: Path) -> None:
    """It exceeds any QoS, needs no chain, and never gets the signal before the limit: only save_interval saves."""
    edit = lambda s: s.replace("--time=20:00:00", f"--time={unlimited}")  # noqa: E731
    found = {f.rule: f for f in findings(folder, plan(run={"save_interval": 0}), script=edit, spares=1)}
    assert "8 of the 24 GPUs of this job, without a limit, are for them" in found["spares"].message
    assert found["qos time"].message == "no time limit, qos_gpu_a100-t3 allows 20 h"
    assert "SLURM sends no signal" in found["checkpoints"].message and "time" not in found
    assert "--time 20:00:00 is requested" in found["script"].message
    with pytest.raises(ValueError, match=r"^time_limit=00:00:00: must be a minute or more$"):
        JobRequest(time_limit="00:00:00")


def test_the_script_that_is_submitted_is_the_one_that_is_looked_at(folder: Path, monkeypatch) -> None:
    """A sweep's array has one script for many run folders."""
    text = render("sweep", plan(), A100, JobRequest(account="xyz@a100"), array="1,2,1001")
    script = folder.parent / "sweep-2x8.sbatch"
    script.write_text(text.replace("set -euo pipefail", "set -eu").replace("@a100", "@v100"))
    where = replace(A100, local=())
    found = {
        f.rule: f for f in preflight.check_job(plan(), where, JobRequest(account="xyz@a100"), folder, script=script)
    }
    assert found["pipefail"].level == REFUSAL and found["account"].message.startswith("account xyz@v100 does not end")
    assert (
        "sweep-2x8.sbatch has xyz@v100" in found["script"].message
        and "create the sweep again" in found["script"].remedy
    )
    script.unlink()
    (missing,) = preflight.check_job(plan(), where, JobRequest(), folder, script=script)
    assert missing.message.endswith("sweep-2x8.sbatch: no such file")


def rules(found) -> list[str]:
    return [f.rule for f in found]


def test_a_limit_that_is_just_reached_is_kept(folder: Path) -> None:
    """t4 allows 16 GPUs and 100 hours; the cluster has 52 nodes."""
    four = {"precision": "fp16", "tp": 2, "pp": 2, "gbs": 480}
    given = {"where": V100, "qos": "qos_gpu-t4", "time_limit": "100:00:00"}
    torch(folder.parent, "2.13.0+cu126", "12.6")
    for gpus, fits in ((16, True), (20, False)):
        p = plan(**V100_PLAN | {"topology": {**four, "dp": gpus // 4, "mbs": 4}})
        assert ("qos gpus" not in rules(findings(folder, p, **given))) is fits
    later = findings(folder, plan(**V100_PLAN | {"topology": four | {"dp": 4}}), **{**given, "time_limit": "100:00:01"})
    assert [f.remedy for f in later if f.rule == "qos time"] == ["ask for 100 h and chain jobs"]


def test_a_checkpoint_less_often_than_ten_times_in_a_job_is_warned_of(folder: Path) -> None:
    """A job of ten hours, one iteration too long for it: an hour between two checkpoints is often enough."""
    second = predict(plan()).sec_per_it
    iterations = int(36_000 / second) + 2
    for interval_s, warned in ((3300, False), (3900, True), (12_000, True)):
        p = plan(train_iters=iterations, run={"save_interval": round(interval_s / second)})
        found = [f for f in findings(folder, p, time_limit="10:00:00") if f.rule == "checkpoints"]
        assert [f.level for f in found] == [WARNING] * warned
    remedy = int(re.findall(r"save_interval=(\d+)", found[0].remedy)[0])
    assert 3500 < remedy * second <= 3600


def test_a_link_of_a_chain_is_held_to_its_own_iterations(folder: Path) -> None:
    """4,000 iterations take eight hours: the last hundred fit into one."""
    assert 6 * 3600 < 4000 * predict(plan()).sec_per_it < 10 * 3600
    for start, late in ((0, True), (3900, False)):
        p = plan(run={"save_interval": 100, "start_iteration": start, "load": str(folder) if start else ""})
        assert ("time" in rules(findings(folder, p, time_limit="01:00:00"))) is late


def test_a_folder_of_one_node_is_none_to_refuse_for_one_node(folder: Path) -> None:
    """/tmp on a login node may not be that of the compute node: a warning."""
    where = replace(A100, local=(str(folder.parent),))
    one = plan(topology={"dp": 2})
    found = preflight.check_job(one, where, JobRequest(account="xyz@a100", time_limit="20:00:00"), folder)
    assert [f.level for f in found if f.rule == "shared"] == [WARNING]


def test_a_started_node_is_a_node(folder: Path) -> None:
    """12 GPUs of 8 a node are two nodes, though not a plan that fills them."""
    p = plan(topology={"tp": 2, "pp": 2, "dp": 3, "gbs": 480})
    request = JobRequest(account="xyz@a100")
    assert JobCheck(p, A100, request, folder, "").nodes == 2
    assert [JobCheck(plan(topology={"dp": d}), A100, request, folder, "").nodes for d in (1, 2, 4)] == [1, 1, 2]


@pytest.mark.parametrize("processes", [4, 16])
def test_fewer_and_more_processes_than_gpus_are_both_refused(processes: int, folder: Path) -> None:
    found = findings(folder, plan(), script=lambda s: s.replace("--nproc-per-node=8", f"--nproc-per-node={processes}"))
    assert f"{processes} processes per node: the plan's 16 GPUs need 8" in [f.message for f in found]


def test_the_free_space_is_what_a_user_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """statvfs(3): f_bavail and f_favail are those of unprivileged users; root's reserve, 5 % on ext4, is not theirs."""
    values = {"f_frsize": 4096, "f_bfree": 100, "f_bavail": 50, "f_files": 10, "f_ffree": 9, "f_favail": 7}
    monkeypatch.setattr(checks.os, "statvfs", lambda _: SimpleNamespace(**values))
    assert AVAILABLE(Path("/")) == (50 * 4096, 7)
    values["f_files"] = 0
    assert AVAILABLE(Path("/")) == (50 * 4096, float("inf")), "a file system that counts no inodes"


def test_no_room_for_the_checkpoints_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are kept and one is being written, 12 bytes a parameter each."""
    monkeypatch.setattr(checks, "available", lambda _: (30e9, 1e9))
    found = next(f for f in findings(folder, plan()) if f.rule == "disk")
    assert (found.level, found.message[:32]) == (REFUSAL, "checkpoints take up to 47.4 GB, ")
    monkeypatch.setattr(checks, "available", lambda _: (60e9, 1e9))
    assert next(f for f in findings(folder, plan()) if f.rule == "disk").level == WARNING


def test_no_inodes_for_the_checkpoints_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 ranks write two files each, in each of three checkpoints."""
    monkeypatch.setattr(checks, "available", lambda _: (1e15, 100))
    assert "checkpoints take 105 files" in next(f.message for f in findings(folder, plan()) if f.rule == "inodes")


def test_a_folder_that_only_one_node_sees_is_refused_for_two(folder: Path) -> None:
    where = replace(A100, local=(str(folder.parent),))
    found = preflight.check_job(plan(), where, JobRequest(account="xyz@a100", time_limit="20:00:00"), folder)
    assert [f.level for f in found if f.rule == "shared"] == [REFUSAL]


def test_a_run_folder_that_holds_a_completed_run_is_refused(folder: Path) -> None:
    write_status(folder, RunStatus(status="completed", evidence="", rank=None, exit_code=0, seconds=1.0))
    assert (REFUSAL, "run folder") in [(f.level, f.rule) for f in findings(folder, plan())]


def test_a_checkpoint_of_another_model_is_refused_and_one_that_is_still_to_come_is_not(folder: Path) -> None:
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


def test_an_allowed_rule_only_warns_and_the_others_still_refuse(folder: Path) -> None:
    found = findings(folder, plan(), account="xyz@v100", allow=["account"])
    assert not preflight.refused(found) and "account" in [f.rule for f in found]
    assert preflight.refused(findings(folder, plan(), account="xyz@v100", allow=["disk"]))


@pytest.mark.parametrize(
    ("version", "cuda", "level"),
    [
        ("2.13.0+cu126", "12.6", None),
        ("2.13.0+cu128", "12.8", REFUSAL),
        ("2.11.0+cu128", "12.8", REFUSAL),
        ("2.10.0+cu128", "12.8", WARNING),
        ("2.9.0+cu130", "13.0", REFUSAL),
        ("2.13.0+cpu", None, REFUSAL),
    ],
)
def test_which_wheel_holds_sm_70(version: str, cuda: str | None, level: str | None, folder: Path) -> None:
    """From 2.11 on only the CUDA 12.6 builds do."""
    torch(folder.parent, version, cuda)
    found = [f.level for f in findings(folder, plan(**V100_PLAN), V100) if f.rule == "wheel"]
    assert found == ([level] if level else [])


@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        ({"gbs": 500}, "gbs", "must be a multiple of mbs x dp = 4 x 4"),
        ({"dp": 5, "gbs": 500}, "tp x pp x dp", "must fill whole nodes of 8 GPUs"),
        ({"tp": 3, "dp": 4}, "tp", "must divide num_attention_heads=16"),
        ({"pp": 5}, "pp", "must divide the 24 layers"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_plan_that_is_none(
    change: dict, rule: str, says: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    values = plan().to_json()
    values["topology"] |= change
    (folder / "plan.json").write_text(json.dumps(values))
    command = [
        "slurm",
        "check",
        str(folder / "plan.json"),
        "--site",
        "jean-zay-a100",
        "--account",
        "xyz@a100",
        "--json",
    ]
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [set(f) for f in found] == [{"level", "rule", "says", "remedy"}]
    assert (found[0]["level"], found[0]["rule"]) == (REFUSAL, rule) and says in found[0]["says"]


def test_every_step_of_a_ramp_is_counted(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """From 32 by 24 to 512 with 16 sequences at once: 56 and 104 are no multiples."""
    values = plan().to_json()
    values["run"]["ramp"] = {"start": 32, "increment": 24, "samples": 10_000}
    (folder / "plan.json").write_text(json.dumps(values))
    assert main(["slurm", "check", str(folder / "plan.json"), "--site", "jean-zay-a100", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"][0]
    assert found["rule"] == "ramp" and "56, 104" in found["says"]


def test_the_command_prints_lines_a_person_reads_and_a_missing_plan_is_bad_input(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (folder / "plan.json").write_text(json.dumps(plan().to_json()))
    venv = str(folder.parent / "venv")
    command = ["slurm", "check", str(folder / "plan.json"), "--site", "jean-zay-a100", "--environment", venv]
    assert main([*command, "--account", "xyz@v100"]) == 1
    said = capsys.readouterr().out
    assert "refusal [account] account xyz@v100 does not end with @a100\n        --account PROJECT@a100\n" in said
    assert main(["slurm", "check", str(folder / "none.json"), "--site", "jean-zay-a100"]) == 2
    assert capsys.readouterr().err.endswith("none.json: no such file\n")


def test_every_rule_can_be_named_in_allow() -> None:
    sources = [Path(module.__file__).read_text() for module in (checks, preflight)]
    used = {rule for text in sources for rule in re.findall(r'"([a-z -]+)", (?:REFUSAL|WARNING|level)', text)}
    assert len(used) > 20 and used <= set(preflight.NAMES)
