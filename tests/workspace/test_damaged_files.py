"""Each file that a run, a sweep or a study leaves, damaged as a crash, a full disk or a person damages files, given to
its readers: never a traceback, but what can be read, or one line that names the file or the field."""

import contextlib
import copy
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from support import REPOSITORY, small_plan

from trilane.analysis import benchmark
from trilane.cli.app import main
from trilane.costmodel.shipped import calibration_for
from trilane.diagnose.capture import write_topology
from trilane.launch.follow import Tail
from trilane.launch.outcome import judge
from trilane.report import html, index, notebook
from trilane.slurm import attempt, chain, client, jobs, ledger, sites, sweep
from trilane.utils.validation import shipped_json
from trilane.workspace import checkpoints, phase_times, run_folder, status
from trilane.workspace.heartbeat import Heartbeat, NodeReport, read_beats
from trilane.workspace.study import Study, load_cluster

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
LINE = (
    " [2026-08-01 12:00:00.000000] iteration {:8d}/       4 | consumed samples: {:12d} | "
    "elapsed time per iteration (ms): 1234.5 | "
    "throughput per GPU (TFLOP/s/GPU): 98.8 | learning rate: 1.500000E-04 | global batch size:     4 | "
    "lm loss: 2.500000E+00 | loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
ONE_LINE = re.compile(r"[^=\n]+=.*: .+")

# --- a study with one run of each kind, as bytes on the disk


def steps() -> list[dict[str, Any]]:
    names = ("sec_per_it", "tflops", "learning_rate", "lm_loss", "loss_scale", "grad_norm")
    values = {**dict.fromkeys(names, 1.5), "global_batch_size": 4, "skipped": 0, "nan": 0}
    return [{"iteration": n, "consumed_samples": 4 * n, **values} for n in range(1, 5)]


def jsonl(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(run: Path) -> None:
    """A completed run of one rank."""
    plan = small_plan("r")
    ended = {"evidence": "rank 0: done", "exit_code": 0}
    files = {
        "plan.json": json.dumps(plan.to_json()),
        "status.json": json.dumps({"status": "completed", "rank": 0, "seconds": 9.5, **ended}),
        "steps.jsonl": jsonl(steps()),
        "run.log": "".join(LINE.format(n, 4 * n) + "\n" for n in range(1, 5)),
        "env.json": json.dumps({"versions": {"torch": "2"}, "host": "h", "devices": ["cpu"]}),
        "ranks/0.log": LINE.format(4, 16) + "\n",
        "ranks/0.phases": jsonl([{"iteration": n, "host": "h", "seconds": {"optimizer": 0.5}} for n in (1, 2)]),
        "ranks/failures.json": json.dumps([{"rank": 0, "pid": 7, "exitcode": -9}]),
        "checkpoints/latest": "iter_0000004\n",
        "stacks/now/states-h.json": json.dumps({"0": "S"}),
        "stacks/now/topology.json": json.dumps({"tp": 1, "pp": 1, "dp": 1, "gpus_per_node": 8, "ranks": [{"rank": 0}]}),
        "stacks/now/rank_0.json": json.dumps(
            [{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": True, "frames": [
                {"name": "all_reduce", "filename": "torch/distributed.py", "line": 5, "locals": None}]}]
        ),
    }  # fmt: skip
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    beat = Heartbeat(rank=0, step=4, phase="optimizer", time=1.0, pid=7, host="h", idle_s=0.5)
    NodeReport(first=0, host="h", start="", ranks=(beat,)).write(run)
    aside = run / "checkpoints/.iter_0000004.x"
    aside.mkdir()
    (aside / "rank_00000.json").write_text("{}")
    checkpoints.write_manifest(
        aside,
        {
            "files": {},
            "iteration": 4,
            "consumed_samples": 16,
            "layout": [],
            "tensors": {},
            "identity": {"shape": {}},
            "scalars": {},
        },
    )
    checkpoints.publish(aside, run / "checkpoints/iter_0000004")
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
        calibration = shipped_json("calibrations")["transferable"]
        prediction = {"memory_bytes": 1e9, "sec_per_it": 1.0}
        entry = {**plan, "id": "x", "prediction": prediction}
        sizing = {"shape": plan["shape"], "cluster": "jz-h100", "gpus": [8], "gbs": 8}
        study.save("plans.json", {"plans": [entry]}, "02")
        study.save("sizing.json", sizing, "01")
        study.save("calibration.json", calibration, "04")
        study.save("headline.json", {"cards": [{"value": "1", "label": "a"}]}, "06")
        (study.folder / "runs.txt").write_text("runs/r\n")
        (study.folder / "chain.json").write_text(json.dumps({"site": "test", "links": ["runs/r"]}))
        rows = (Path(sites.__file__).parents[1] / "data/measured.csv").read_text().splitlines()[:4]
        (study.folder / "measured.csv").write_text("\n".join(rows) + "\n")
        cells = [nbformat.v4.new_markdown_cell("# Question?"), nbformat.v4.new_code_cell("gbs: int = 4  # sequences")]
        cells[1].metadata["tags"] = ["parameters"]
        cells[1].outputs = [nbformat.v4.new_output("stream", text="4")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), study.folder / "01_sizing.ipynb")
        (outputs / "local.json").write_text(json.dumps(plan["cluster"]))
        shutil.copytree(REPOSITORY / "lib/trilane/data/examples/restart", study.folder / "restart")
    return outputs


# --- the readers: each takes the study's folder


def cli(*words: str) -> Callable[[Path], object]:
    """A command; {} is the study's folder. Its error must be one line."""

    def call(study: Path) -> None:
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = main([word.format(study) for word in words])
        if code == 2:
            text = error.getvalue().strip().removeprefix("trilane: ")
            if not ONE_LINE.fullmatch(text):
                raise AssertionError(text)

    return call


def of_run(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda study: read(study / "runs/r")


def of_study(read: Callable[[Study], object]) -> Callable[[Path], object]:
    return lambda study: read(Study("s"))


READERS: dict[str, Callable[[Path], object]] = {
    "plan show": cli("plan", "show", "{}/runs/r"),
    "slurm status": cli("slurm", "status", "{}/runs/r", "--lines", "5"),
    "sweep": sweep.members,
    "chain": chain.stages_of,
    "plan show plans.json": cli("plan", "show", "{}/plans.json"),
    "logs parse": cli("logs", "parse", "{}/runs/r"),
    "logs parse measured": cli("logs", "parse", "{}/measured.csv"),
    "debug hang": cli("debug", "hang", "{}/runs/r"),
    "debug stragglers": cli("debug", "stragglers", "{}/runs/r"),
    "debug capture": cli("debug", "capture", "{}/runs/r", "--commands"),
    "debug restart": cli("debug", "restart", "{}/restart/save_805", "{}/restart/load_805"),
    "debug restart checkpoint": cli("debug", "restart", "{}/runs/r", "{}/runs/r"),
    "job begin": of_run(lambda run: attempt.begin(run, {**JOB, "TRILANE_SWEEP": str(run.parents[1])})),
    "job end": of_run(lambda run: attempt.end(run, 0, JOB)),
    "job end 1": of_run(lambda run: attempt.end(run, 1, JOB)),
    "job status": of_run(lambda run: jobs.job_status([run]).to_frame()),
    "measure plan": of_run(lambda run: benchmark.text(benchmark.result(run))),
    "headline": of_study(index.headline),
    "notebook": lambda study: html.read_notebook(study / "01_sizing.ipynb"),
    "parameters": lambda study: notebook.read_parameters(study / "01_sizing.ipynb"),
    "model": of_study(lambda study: study.model()),
    "plans": of_study(lambda study: study.plans()),
    "calibration": lambda study: calibration_for(load_cluster("jz-h100"), "s"),
    "local": lambda study: load_cluster("local"),
    "save": of_study(lambda study: study.save("plans.json", {"plans": []}, "02")),
    "run folder": of_study(lambda study: study.run_folder(small_plan("r"), {"plan.json": "{}"})),
    "iteration": of_run(run_folder.iteration),
    "cut steps": of_run(lambda run: run_folder.cut_steps(run, 2)),
    "reopen": of_run(run_folder.reopen),
    "is completed": of_run(run_folder.is_completed),
    "status": of_run(status.read_status),
    "judge": of_run(lambda run: [judge(run, code, 1.0) for code in (0, 1)]),
    "tail": of_run(lambda run: Tail(run / "steps.jsonl").lines()),
    "latest": of_run(lambda run: checkpoints.latest(run / "checkpoints")),
    "keep last": of_run(lambda run: checkpoints.keep_last(run / "checkpoints", 1)),
    "beats": of_run(read_beats),
    "topology": of_run(lambda run: write_topology(run / "stacks/now", small_plan(), read_beats(run))),
    "phases": of_run(phase_times.read_phase_times),
}
RUN = "s/runs/r/"
# The file: its readers; behind them those, fast ones, that get each field damaged, too
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    RUN + "plan.json": (("plan show", "slurm status", "debug hang", "debug stragglers", "job begin", "run folder"), ()),
    RUN + "status.json": (("logs parse", "job end", "job status", "run folder"), ("status", "is completed", "judge")),
    RUN + "steps.jsonl": (("job begin", "job status", "cut steps", "measure plan", "tail"), ("iteration",)),
    RUN + "jobs.jsonl": (("slurm status", "job begin", "job end"), ("job status",)),
    RUN + "run.log": (("logs parse", "slurm status", "job end 1", "job status"), ()),
    RUN + "env.json": (("measure plan",), ()),
    RUN + "ranks/0.log": (("judge", "reopen"), ()),
    RUN + "ranks/nodes/0.json": (("debug capture", "topology", "reopen"), ("beats",)),
    RUN + "ranks/0.phases": (("debug stragglers",), ("phases",)),
    RUN + "ranks/failures.json": ((), ("judge",)),
    RUN + "checkpoints/latest": (("latest", "keep last", "job begin"), ()),
    RUN + "checkpoints/iter_0000004/manifest.json": (("latest", "keep last"), ("debug restart checkpoint",)),
    RUN + "checkpoints/iter_0000004/rank_00000.json": (("debug restart checkpoint",), ()),
    RUN + "stacks/now/topology.json": ((), ("debug hang",)),
    RUN + "stacks/now/states-h.json": (("topology",), ()),
    RUN + "stacks/now/rank_0.json": (("debug hang",), ()),
    "s/restart/save_805/fingerprint_00000.json": ((), ("debug restart",)),
    "s/plans.json": (("plan show plans.json", "save"), ("plans",)),
    "s/sizing.json": ((), ("model",)),
    "s/calibration.json": ((), ("calibration",)),
    "s/headline.json": ((), ("headline",)),
    "s/runs.txt": (("sweep", "job begin"), ()),
    "s/chain.json": (("chain",), ()),
    "s/measured.csv": (("logs parse measured",), ()),
    "s/01_sizing.ipynb": ((), ("notebook", "parameters")),
    "local.json": ((), ("local",)),
}
CHANGES = {"job begin", "job end", "job end 1", "cut steps", "reopen", "run folder", "save", "keep last", "topology"}

# --- the damages: what replaces the file's bytes, None for a folder in its place


def damages(data: bytes) -> dict[str, bytes | None]:
    """Damages of a file with that content."""
    return {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "half a character": data[: len(data) // 2] + b"\xe2\x82",
        "trailing NULs": data + b"\0" * 5000,
        "all NULs": b"\0" * len(data),
        "garbage": bytes(range(256)) * 8,
        "list": b"[]",
        "object": b"{}",
        "null": b"null",
        "text": b'"x"',
        "number": b"3",
        "deep": b"[" * 100_000,
        "huge number": b"9" * 5000,
        "a folder": None,
    }


def damaged_fields(data: bytes, name: str) -> dict[str, bytes]:
    """Of a JSON file each field missing, of another type, or huge; of lines the first, alone and before the others."""
    if name.endswith((".jsonl", ".phases")):
        first = json.loads(data.split(b"\n")[0])
        lines = [(how, json.dumps(values).encode() + b"\n") for how, values in wrong_fields(first)]
        return {**dict(lines), **{f"{how}, then good": line + data for how, line in lines}}
    return {how: json.dumps(values).encode() for how, values in wrong_fields(json.loads(data))}


def wrong_fields(values: Any, where: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """The values with one field missing, or of another type, down to `depth`."""
    found = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(found)[:12]:
        for how, other in (("missing", ...), ("null", None), ("text", "x"), ("list", [7]), ("object", {"a": 1}),
                           ("huge", 10**400), ("negative", -1), ("infinite", float("inf"))):  # fmt: skip
            changed = copy.copy(values)
            if other is ...:
                del changed[key]
            elif type(other) is type(value):
                continue
            else:
                changed[key] = other
            yield f"{where}{key} {how}", changed
        if depth > 1:
            for how, inner in wrong_fields(value, f"{where}{key}.", depth - 1):
                yield (
                    how,
                    {**values, key: inner} if isinstance(values, dict) else [*values[:key], inner, *values[key + 1 :]],
                )


@pytest.fixture
def outputs(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the outputs folder, for SLURM commands that know no job."""
    monkeypatch.setattr(client, "states", lambda ids, *_: {i: client.JobState(id=i, state="FORGOTTEN") for i in ids})
    monkeypatch.setattr(client, "call", lambda command, *_, **__: "")
    monkeypatch.setenv("TRILANE_OUTPUTS", str(tmp_path / "outputs"))
    return Path(shutil.copytree(whole, tmp_path / "outputs"))


def damage(path: Path, data: bytes | None) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.mkdir() if data is None else path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_never_a_traceback(name: str, whole: Path, outputs: Path) -> None:
    data, wrong, pairs = (whole / name).read_bytes(), [], 0
    some, fast = FILES[name]
    cases = [(reader, how, bad) for how, bad in damages(data).items() for reader in (*some, *fast)]
    fields = damaged_fields(data, name) if fast else {}
    for reader, how, bad in [*cases, *((reader, how, bad) for how, bad in fields.items() for reader in fast)]:
        damage(outputs / name, bad)
        pairs += 1
        try:
            READERS[reader](outputs / "s")
        except Exception as error:
            if not (isinstance(error, ValueError) and ONE_LINE.fullmatch(str(error))):
                wrong.append(f"{reader} <- {how}: {type(error).__name__}: {str(error)[:150]}")
        if reader in CHANGES:
            shutil.rmtree(outputs)
            shutil.copytree(whole, outputs)
    assert not wrong, f"{len(wrong)} of {pairs}:\n" + "\n".join(wrong)
