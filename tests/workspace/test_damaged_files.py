"""Each file that a run, a sweep or a study leaves, damaged as a crash, a full disk or a person
damages files, given to its readers: never a traceback, but what can be read, or one line that names
the file or the field.
"""

import contextlib
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import small_plan

from trilane.analysis.measure import measure
from trilane.cli.app import main
from trilane.costmodel.shipped import calibration_for
from trilane.launch.outcome import judge
from trilane.slurm import attempt, client, jobs
from trilane.utils.validation import shipped_json
from trilane.workspace import checkpoints, ledger
from trilane.workspace import run as run_module
from trilane.workspace.heartbeat import Heartbeat, NodeReport, read_beats
from trilane.workspace.study import Study, load_cluster
from trilane_diagnose import nodes
from trilane_diagnose.capture import write_topology
from trilane_diagnose.stragglers import read_phase_times

LINE = (
    " [2026-08-01 12:00:00.000000] iteration {:8d}/       4 | consumed samples: {:12d} | elapsed time per iteration"
    " (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 98.8 | learning rate: 1.500000E-04 | global batch size:     4 |"
    " lm loss: 2.500000E+00 | loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
STEP = dict.fromkeys(
    ("sec_per_it", "tflops", "learning_rate", "lm_loss", "loss_scale", "grad_norm"), 1.5
)
STEPS = [{"iteration": n, "consumed_samples": 4 * n, **STEP, "global_batch_size": 4, "skipped": 0, "nan": 0}
         for n in range(1, 5)]  # fmt: skip
DUMP = 'Process 7: python train.py\nThread 7 (active+gil): "MainThread"\n    all_reduce (torch/distributed.py:5)\n'


def write_run(run: Path) -> None:
    """A completed run of one rank."""
    ended = {
        "status": "completed",
        "rank": 0,
        "seconds": 9.5,
        "evidence": "rank 0: done",
        "exit_code": 0,
    }
    files: dict[str, Any] = {
        "plan.json": small_plan("r").to_json(),
        "status.json": ended,
        "steps.jsonl": "".join(json.dumps(step) + "\n" for step in STEPS),
        "run.log": "".join(LINE.format(n, 4 * n) for n in range(1, 5)),
        "env.json": {"versions": {"torch": "2"}, "host": "h", "devices": ["cpu"]},
        "ranks/0.phases": json.dumps({"iteration": 1, "host": "h", "seconds": {"optimizer": 0.5}})
        + "\n",
        "ranks/failures.json": [{"rank": 0, "pid": 7, "exitcode": -9}],
        "stacks/now/topology.json": {
            "tp": 1,
            "pp": 1,
            "dp": 1,
            "gpus_per_node": 8,
            "ranks": [{"rank": 0}],
        },
        "stacks/now/rank_0.txt": DUMP,
        "checkpoints/iter_0000004/rank_00000.json": {},
    }
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content if isinstance(content, str) else json.dumps(content))
    beat = Heartbeat(rank=0, step=4, phase="optimizer", time=1.0, pid=7, host="h", idle_s=0.5)
    NodeReport(first=0, host="h", start="", ranks=(beat,)).write(run)
    content = {
        "files": {},
        "iteration": 4,
        "consumed_samples": 16,
        "layout": [],
        "tensors": {},
        "scalars": {},
    }
    checkpoints.write_manifest(
        run / "checkpoints/iter_0000004", {**content, "identity": {"shape": {}}}
    )
    for event, facts in (
        ("submitted", {"site": "test", "script": ""}),
        ("started", {"nodes": "n1", "iteration": 0, "restarts": 0}),
        ("ended", {"status": "completed", "evidence": "x"}),
    ):
        ledger.note(run, event, "7", **facts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs folder with the study `s`."""
    outputs = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILANE_OUTPUTS", str(outputs))
        study = Study.create("s")
        run = study.folder / "runs/r"
        write_run(run)
        plan = json.loads((run / "plan.json").read_text())
        calibration = shipped_json("calibrations")["jz-a100-80g"]
        prediction = {"memory_bytes": 1e9, "sec_per_it": 1.0}
        entry = {**plan, "id": "x", "prediction": prediction}
        sizing = {"shape": plan["shape"], "cluster": "jz-h100", "gpus": [8], "gbs": 8}
        study.save("plans.json", {"plans": [entry]}, "02")
        study.save("sizing.json", sizing, "01")
        study.save("calibration.json", calibration, "04")
        (outputs / "local.json").write_text(json.dumps(plan["cluster"]))
    return outputs


def cli(*words: str) -> Callable[[Path], object]:
    """A command; {} is the study's folder. Its error must be one line."""

    def call(study: Path) -> None:
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = main([word.format(study) for word in words])
        if code == 2:
            raise ValueError(error.getvalue().strip().removeprefix("trilane: "))

    return call


def cut_and_begin(run: Path) -> None:
    """As a job that starts again."""
    attempt.begin(run)
    run_module.iteration(run)
    run_module.cut_steps(run, 2)
    run_module.put_aside(run, keep=True)


def ends(run: Path) -> None:
    jobs.job_status([run]).to_frame()
    judge(run, 1)
    nodes.end(run, 1)
    assert run_module.Run(run).is_completed in (True, False)


Reader = Callable[[Path], object]
BEGIN: Reader = lambda study: cut_and_begin(study / "runs/r")  # noqa: E731
END: Reader = lambda study: ends(study / "runs/r")  # noqa: E731
HANG, LOGS = cli("debug", "hang", "{}/runs/r"), cli("logs", "parse", "{}/runs/r")
RESTART = cli("debug", "restart", "{}/runs/r", "{}/runs/r")
RUN = "s/runs/r/"
FILES: dict[str, tuple[Reader, ...]] = {
    RUN + "plan.json": (
        cli("plan", "show", "{}/runs/r"),
        cli("slurm", "status", "{}/runs/r"),
        HANG,
        BEGIN,
    ),
    RUN + "status.json": (LOGS, END, BEGIN),
    RUN + "steps.jsonl": (BEGIN, END, lambda study: measure(study / "runs/r")),
    RUN + "jobs.jsonl": (cli("slurm", "status", "{}/runs/r"), BEGIN, END),
    RUN + "run.log": (LOGS, END),
    RUN + "ranks/nodes/0.json": (
        lambda study: write_topology(
            study / "runs/r/stacks/now", small_plan(), read_beats(study / "runs/r")
        ),
    ),
    RUN + "ranks/0.phases": (
        cli("debug", "stragglers", "{}/runs/r"),
        lambda study: read_phase_times(study / "runs/r"),
    ),
    RUN + "ranks/failures.json": (END,),
    RUN + "checkpoints/iter_0000004/manifest.json": (RESTART, BEGIN),
    RUN + "stacks/now/topology.json": (HANG,),
    "s/plans.json": (
        cli("plan", "show", "{}/plans.json"),
        lambda study: Study("s").plans(),
        lambda study: Study("s").save("plans.json", {"plans": []}, "02"),
    ),
    "s/sizing.json": (lambda study: Study("s").model(),),
    "s/calibration.json": (lambda study: calibration_for(load_cluster("jz-h100"), "s"),),
    "local.json": (lambda study: load_cluster("local"),),
}


def damages(data: bytes) -> dict[str, bytes]:
    """What replaces a file of that content; of a JSON object each field, wrong."""
    bad = {
        "empty": b"",
        "cut inside a character": data[: len(data) // 2] + b"\xe2\x82",
        "trailing NULs": data + b"\0" * 5000,
        "garbage": bytes(range(256)) * 8,
        "list": b"[]",
        "deep": b"[" * 100_000,
    }
    with contextlib.suppress(ValueError):
        values = json.loads(data.split(b"\n")[0] if data.count(b"}\n") > 1 else data)
        for key in list(values)[:20] if isinstance(values, dict) else ():
            for wrong in ("x", [7], 10**400):
                text = json.dumps({**values, key: wrong})
                bad[f"{key} {type(wrong).__name__}"] = text.encode()
    return bad


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_never_a_traceback(name: str, whole: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        client, "states", lambda ids, *_: {i: client.JobState(id=i, state="FORGOTTEN") for i in ids}
    )
    monkeypatch.setattr(client, "call", lambda command, *_, **__: "")
    outputs, wrong = tmp_path / "outputs", []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("TRILANE_OUTPUTS", str(outputs))
    shutil.copytree(whole, outputs)
    data = (whole / name).read_bytes()
    for (how, bad), read in itertools.product(damages(data).items(), FILES[name]):
        (outputs / name).write_bytes(bad)
        try:
            read(outputs / "s")
        except Exception as error:
            if not (isinstance(error, ValueError) and re.fullmatch(r"[^=\n]+=.*: .+", str(error))):
                wrong.append(f"{how}: {type(error).__name__}: {str(error)[:150]}")
        if read in (BEGIN, END):
            shutil.rmtree(outputs / RUN)
            shutil.copytree(whole / RUN, outputs / RUN)
        (outputs / name).write_bytes(data)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)
