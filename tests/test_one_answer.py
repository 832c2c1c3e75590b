"""One plan has one number: every command and notebook that shows seconds, bytes or P(OOM) shows the
same.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from support import REPOSITORY, small_cluster

from trilane.cli import plan as commands
from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.plan import Plan, plan_of, read_plan
from trilane.costmodel.calibration import to_json
from trilane.costmodel.predict import SAFE, Prediction, predict
from trilane.costmodel.shipped import calibration_for, default
from trilane.report.widgets import explore
from trilane.utils.numbers import with_bounds
from trilane.workspace.study import Study

matplotlib.use("Agg")


A100 = cluster("jz-a100-80g")
SMALL = {"tp": 1, "pp": 2, "dp": 1, "mbs": 2, "gbs": 4}
LARGE = {"tp": 4, "pp": 6, "dp": 16, "mbs": 2, "gbs": 2048, "recompute": "full"}
LARGE["attention"] = "scores"
SHAPES = [parse_shape("6,64,2,32,384"), parse_shape("72,14336,64,2048,250880")]
PLANS = {
    "this machine": plan_of(SHAPES[0], small_cluster(), "megatron", SMALL),
    "out of memory": plan_of(SHAPES[1], A100, "deepspeed-3d", LARGE),
}
SITES = {"this machine": "local", "out of memory": "jean-zay-a100"}
PINNED = "tp pp dp mbs zero recompute interleaving partition sequence_parallel offload cp"
PINNED += " first_stage_layers last_stage_layers overlap_grad_reduce overlap_param_gather"
PINNED += " precision attention fp32_gradients"
ASKED = "--cluster jz-v100-32g --gpus 32 --gbs 512"
RUN = "--tokens 30B --price 2 --spare-nodes 0"
QUESTIONS = {
    "search": f"--shape 24,2048,16,2048,50304 {ASKED}",
    "size": f"--params 1.3B {ASKED} {RUN} --top 1",
    "best": f"--days 60 {ASKED} {RUN} --engine megatron",
}
COMPARED = "id sec_per_it sec_lo sec_hi memory_gib oom_probability iterations gpus"
COMPARED += " days_p05 days_p50 days_p95 gpu_hours_p05 gpu_hours_p50 gpu_hours_p95 money_p50"


def figures(prediction: Any) -> tuple[float, float, float]:
    names = ("sec_per_it", "memory_bytes", "oom_probability")
    values = prediction if isinstance(prediction, dict) else vars(prediction)
    return tuple(values[name] for name in names)


def printed(capsys, *words: object) -> Any:
    """The JSON that a command of these words prints; a text holds several."""
    main([*" ".join(map(str, words)).split(), "--json"])
    return json.loads(capsys.readouterr().out)


def pinned(plan: Plan) -> dict[str, str]:
    """Every choice of the plan, as options and parameters of a notebook give it."""
    values = {name: getattr(plan.topology, name) for name in PINNED.split()}
    return {
        name: ("yes" if v else "no") if isinstance(v, bool) else str(v)
        for name, v in values.items()
    }


def options(plan: Plan, tmp_path) -> list[str]:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(dataclasses.asdict(plan.cluster)))
    s = plan.shape
    shape = f"{s.num_layers},{s.hidden_size},{s.num_attention_heads},{s.seq_length},{s.vocab_size}"
    words = f"--shape {shape} --cluster {machine} --gbs {plan.topology.gbs} --engine {plan.engine}"
    return words.split() + [
        word for name, v in pinned(plan).items() for word in (f"--{name.replace('_', '-')}", v)
    ]


def sizes(plan: Plan, tmp_path) -> dict[str, Any]:
    """The parameters of 02 for the plan's model and machine, with every choice of the plan that 02
    can pin.
    """
    _, shape, _, machine, *_ = options(plan, tmp_path)
    choices = {n: v for n, v in pinned(plan).items() if n not in ("tp", "pp", "dp", "offload")}
    given = {
        "shape": shape,
        "cluster": machine,
        "gpus": str(plan.topology.gpus),
        "gbs": plan.topology.gbs,
    }
    return {**given, "engine": plan.engine, **choices}


@pytest.fixture(params=PLANS, ids=lambda name: name.replace(" ", "-"))
def case(
    request: pytest.FixtureRequest, tmp_path, outputs: Path
) -> tuple[str, Plan, Prediction, Path]:
    plan = PLANS[request.param]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    return request.param, plan, predict(plan), path


def test_every_command_shows_the_prediction_of_the_plan(case, tmp_path, capsys):
    name, plan, expected, path = case
    shown = printed(capsys, f"plan show {path}")
    assert (shown["id"], figures(shown["prediction"])) == (plan.id, figures(expected))
    again = printed(capsys, "plan show", *options(plan, tmp_path))
    assert (again["id"], figures(again["prediction"])) == (plan.id, figures(expected))

    asked = [*options(plan, tmp_path), "--gpus", plan.topology.gpus]
    found = printed(capsys, "plan search", *asked)
    listed = [(p["id"], p["label"], figures(p["prediction"])) for p in found["plans"]]
    assert listed == ([] if name == "out of memory" else [(plan.id, plan.label, figures(expected))])

    if name != "out of memory":
        forecast = printed(capsys, f"plan calendar {path} --tokens 1e9 --runs 100")
        assert (forecast["plan_id"], figures(forecast["prediction"])) == (
            plan.id,
            figures(expected),
        )

    main(f"slurm check {path} --site {SITES[name]} --account xyz@a100 --json".split())
    report = capsys.readouterr().out
    size = f"predicted {expected.memory_bytes / 2**30:.1f} of"
    assert ("memory" in report and size in report) == (expected.oom_probability > 0.1)


def answer(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one plan in a command's JSON, each by one name."""
    values = dict[str, Any]()
    for part in ("topology", "prediction", "costs"):
        values |= found.get(part, {})
    if "memory_bytes" in values:
        values["memory_gib"] = values["memory_bytes"] / 2**30
    values |= found
    if "plan_id" in found:
        values["id"] = found["plan_id"]
    if "dp" in values:
        values["gpus"] = values["tp"] * values["pp"] * values["dp"]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("command", QUESTIONS)
def test_no_command_contradicts_another(command: str, tmp_path, outputs: Path, capsys, monkeypatch):
    """One question: what lists its plan, shows, dates, decides, checks, chains and converts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "find_spec", lambda name: None)  # decide executes no notebook

    def of(words: str) -> Any:
        return printed(capsys, words)

    listed = of(f"plan {command} {QUESTIONS[command]}")
    Path("plan.json").write_text(json.dumps(listed))
    plan = listed["plans"][0]
    decided = of(f"decide plan.json {RUN}")
    cases = {case["kind"]: case for case in reversed(decided["cases"])}
    assert decided["recommendation"]["figures"].items() <= cases["recommended"].items()
    (link,) = of("slurm chain plan.json chain --site generic")["links"]
    seconds = 3600 * link["hours"] / (link["last"] - link["first"] + 1)
    written = of("convert megatron plan.json")["arguments"]
    words = ["torchrun --nproc_per_node 4 --nnodes 8 pretrain_gpt.py"]
    words += [f"--{name} {' '.join(values)}" for name, values in written.items()]
    Path("launch.txt").write_text(" ".join(words))
    read = of("convert megatron --read launch.txt --cluster jz-v100-32g")["plan"]
    Path("read.json").write_text(json.dumps(read))
    answers = {
        command: answer(plan),
        "show": answer(of("plan show plan.json")),
        "calendar": answer(of(f"plan calendar plan.json {RUN}")),
        "decide": answer({**decided, **cases["plan"]}),
        "chain": {"sec_per_it": seconds, "gpus": link["gpu_hours"] / link["hours"]},
        "megatron": answer(of("plan show read.json")),
    }
    if command != "search":  # whose plans train 50 iterations
        for by in (command, "show"):
            answers[by]["iterations"] = plan["run"]["train_iters"]
        answers["chain"]["iterations"] = link["last"]
        answers["megatron"]["iterations"] = int(written["train-samples"][0]) / 512
    for name in COMPARED.split():
        values = {by: found[name] for by, found in answers.items() if name in found}
        first = next(iter(values.values()))
        assert len(values) > 1 or (command, name) == ("search", "iterations"), name
        assert [*values.values()] == pytest.approx([first] * len(values), rel=1e-9), (name, values)
    spared = of("plan calendar plan.json --tokens 30B")
    assert spared["days_p50"] < answers["calendar"]["days_p50"], "4 spare nodes by default"
    rules = {one["rule"] for one in of("slurm check plan.json --site generic")["findings"]}
    assert "memory" not in rules and answers["show"]["oom_probability"] <= SAFE


@pytest.mark.slow
def test_every_notebook_shows_the_prediction_of_the_plan(case, tmp_path):
    """02, 03, 07 and 08 in one study, their cells executed one after the other in this process."""
    name, plan, expected, _ = case
    if name == "out of memory":
        with pytest.raises(ValueError, match=f"memory={expected.memory_bytes / 2**30:.1f} GiB"):
            explore(plan, default(plan.cluster))
    else:
        text = explore(plan, default(plan.cluster)).caption.value
        seconds = with_bounds(expected.sec_per_it, expected.sec_lo, expected.sec_hi)
        assert f"take {seconds} s;" in text
        assert f"Memory: {expected.memory_bytes / 2**30:.1f} of" in text
    study = {"study": "one"}
    execute("02_topology", **study, **sizes(plan, tmp_path), keep=500)
    handed = {p["id"]: p for p in Study("one").load("plans.json", "02_topology")["plans"]}
    if name == "out of memory":
        assert handed and plan.id not in handed
        return
    assert figures(handed[plan.id]["prediction"]) == figures(expected)

    execute("07_calendar", **study, plan=plan.id, tokens=1e9, runs=100)
    calendar = Study("one").load("calendar.json", "07_calendar")
    assert (calendar["plan_id"], figures(calendar["prediction"])) == (plan.id, figures(expected))
    decided = execute("08_decision", **study)["decision"]
    assert plan.id in str(decided.to_json()) + str(decided.notes())

    execute("03_launch", **study, runs=1, control=False, train=False, train_iters=10, corpus="mock")
    written = [json.loads(p.read_text()) for p in Study("one").folder.glob("runs/*/plan.json")]
    first = next(iter(handed.values()))
    assert [figures(p["prediction"]) for p in written] == [figures(first["prediction"])]


def test_a_plan_keeps_the_constants_that_predicted_it(tmp_path, outputs: Path, capsys, monkeypatch):
    """Constants of a study -> a search of 02 and of the command line: one number in show, calendar,
    chain, 07 and 08.
    """
    monkeypatch.chdir(tmp_path)
    plan, study = PLANS["this machine"], Study.create("uni")
    slow = dataclasses.replace(default(plan.cluster), pace=1.5)
    path = study.save("calibration.json", to_json(slow), "04_analyze")
    measured = calibration_for(plan.cluster, "uni")
    expected = predict(plan, measured).sec_per_it
    assert expected > 1.2 * predict(plan).sec_per_it
    for source in ("uni", str(path)):
        asked = [*options(plan, tmp_path), "--gpus", plan.topology.gpus, "--calibration", source]
        found = printed(capsys, "plan search", *asked)
        (tmp_path / "found.json").write_text(json.dumps(found))
        assert found["plans"][0]["id"] == plan.id
        kept = found["plans"][0]["calibration"]
        assert (kept["name"], kept["hash"]) == (source, measured.hash)
        assert of_every_command(capsys) == pytest.approx([expected] * 4, rel=1e-12), source
    execute("02_topology", study="uni", **sizes(plan, tmp_path), calibration="uni")
    execute("07_calendar", study="uni", tokens=1e9, runs=100, plan=plan.id)
    calendar = Study("uni").load("calendar.json", "07_calendar")
    decided = execute("08_decision", study="uni")["decision"]
    assert calendar["prediction"]["sec_per_it"] == expected and not decided.is_stale
    capsys.readouterr()
    path.write_text(json.dumps(to_json(default(plan.cluster))))
    assert of_every_command(capsys) == pytest.approx([expected] * 4, rel=1e-12), (
        "whatever became of the study"
    )
    other = dataclasses.replace(measured, card="H100-80GB")
    with pytest.raises(ValueError, match="is of H100-80GB"):
        predict(plan, other)


def of_every_command(capsys) -> list[float]:
    """Seconds of an iteration of the plan in found.json: as it holds them, in show, in calendar,
    and in a chain.
    """
    kept = json.loads(Path("found.json").read_text())["plans"][0]["prediction"]["sec_per_it"]
    shown = printed(capsys, "plan show found.json")["prediction"]["sec_per_it"]
    assert predict(read_plan("found.json")).sec_per_it == shown, (
        "in Python, by the constants that the plan carries"
    )
    dated = printed(capsys, "plan calendar found.json --tokens 1e9 --runs 100")
    shutil.rmtree("chain", ignore_errors=True)
    (link,) = printed(capsys, "slurm chain found.json chain --site generic")["links"]
    return [
        kept,
        shown,
        dated["prediction"]["sec_per_it"],
        3600 * link["hours"] / (link["last"] - link["first"] + 1),
    ]


def execute(name: str, **given: Any) -> dict[str, Any]:
    """The names that a notebook's cells leave, executed with these parameters."""
    cells = json.loads((REPOSITORY / f"notebooks/{name}.ipynb").read_text())["cells"]
    namespace: dict[str, Any] = {"display": print}  # as IPython has it
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), namespace)
            if "parameters" in cell["metadata"].get("tags", []):
                assert set(given) <= set(namespace), f"{name} has no {set(given) - set(namespace)}"
                namespace |= given
    return namespace
