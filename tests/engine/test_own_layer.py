"""Layers of a researcher's own: one loss curve on each topology that they allow; a line for what
would not train.
"""

import functools
import json
import linecache
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from plans import SHAPE, changed, losses_and_norms, run_folder, small_plan

from trilane.analysis.plan_report import plan_report
from trilane.config.layer import Layer, layer_of, read_layer
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.launch.local import train_local
from trilane.workspace.checkpoints import name_of
from trilane.workspace.continuation import identity, require_same

HERE = Path(__file__).parent
Truth = Callable[[str], list[list[float]]]


def own_plan(data: Path, kind: str, **topology: object) -> Plan:
    plan = small_plan(data, iters=3, source="mock", shape=replace(SHAPE, num_layers=2), **topology)
    return replace(plan, layer=read_layer(f"own_layers.py:{kind}", HERE))


@pytest.fixture(scope="module")
def alone(fork: Callable, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """[loss, gradient norm] of a layer's iterations in one process."""

    @functools.cache
    def of(kind: str) -> list[list[float]]:
        folder = run_folder(own_plan(data, kind), tmp_path_factory.mktemp("alone") / "run")
        fork(1, folder)
        return losses_and_norms(folder)

    return of


ROWS = {
    "QKNorm TP2": {"tp": 2},
    "QKNorm TP2 DP2, all else": {
        "tp": 2,
        "dp": 2,
        "zero": 1,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "QKNorm PP2": {"pp": 2},
    "Mixer TP2": {"tp": 2},
    "Mixer TP2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "Averages PP2 DP2": {"pp": 2, "dp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_own_layer_has_one_loss_curve(
    name: str, fork: Callable, alone: Truth, data: Path, tmp_path: Path
) -> None:
    """Initial values, and gradients of what tensor-parallel ranks hold whole, are those of one
    process.
    """
    kind, topology = name.split()[0], ROWS[name]
    plan = own_plan(data, kind, **topology)
    folder = run_folder(plan, tmp_path / "run")
    fork(plan.topology.gpus, folder)
    for (loss, norm), (right, right_norm) in zip(
        losses_and_norms(folder), alone(kind), strict=True
    ):
        assert loss == pytest.approx(right, abs=1e-5, rel=0) and norm == pytest.approx(
            right_norm, rel=1e-5
        )
    assert alone(kind)[-1] < alone(kind)[0]


SUMMED = """
from trilane_engine.backends.base import build
for name, parameter in build(plan, world).modules[0].named_parameters():
    if parameter._backward_hooks:
        print(name.rpartition("layers.")[2])
"""


@pytest.mark.slow
def test_partial_gradients_are_found_where_the_first_ones_are_zero(
    ask: Callable, data: Path
) -> None:
    """The gate's are parts on each rank, and 0 in the first iteration, as what follows it begins
    with 0.
    """
    assert (
        ask(own_plan(data, "Mixer", tp=2), SUMMED).split() == ["0.layer.gate", "1.layer.gate"] * 2
    )


@pytest.mark.slow
def test_a_checkpoint_of_an_own_layer_goes_on_elsewhere(
    fork: Callable, alone: Truth, data: Path, tmp_path: Path
) -> None:
    """From TP 2 to one process: what the layer divides is put together."""
    first = run_folder(
        changed(own_plan(data, "Mixer", tp=2), "run", exit_iteration=2), tmp_path / "first"
    )
    fork(2, first)
    assert (first / "checkpoints" / name_of(2)).is_dir()
    second = run_folder(
        changed(own_plan(data, "Mixer"), "run", load=str(first)), tmp_path / "second"
    )
    fork(1, second)
    assert losses_and_norms(second)[-1] == pytest.approx(alone("Mixer")[-1], abs=1e-5)


def test_a_checkpoint_of_another_layer_is_refused(data: Path) -> None:
    plan, other = own_plan(data, "Mixer"), replace(own_plan(data, "Mixer"), layer=None)
    held = {"identity": identity(plan), "iteration": 0, "consumed_samples": 0}
    require_same("iter_1", held, plan)
    for wanted, was in ((other, plan), (plan, other), (own_plan(data, "QKNorm"), plan)):
        with pytest.raises(ValueError, match=r"^layer=.*: the checkpoint iter_1 was trained with"):
            require_same("iter_1", held | {"identity": identity(was)}, wanted)


HEAD = """import torch
from torch import nn
class Own(nn.Module):
    def __init__(self, config, layer_number):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.hidden_size)
"""
FORWARD = "    def forward(self, x):\n        return "
OVERLAPS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
)  # as the best plans of a search have them
# the text of the file, the topology, and the line
BAD = [
    (f"{HEAD}{FORWARD}self.up(x)", {"tp": 2}, "ignores tp=2"),
    (f"{HEAD}{FORWARD}self.up(x)[:-1]", {}, "returns (63, 2, 64) of torch.float32 for (64, 2, 64)"),
    (f"{HEAD}{FORWARD}self.up(x).double()", {}, "returns (64, 2, 64) of torch.float64 for"),
    (f"{HEAD}{FORWARD}[x]", {}, "returns list, must return one tensor"),
    (f"{HEAD}{FORWARD}self.up(x).detach()", {}, "has no backward: its output"),
    (
        f"{HEAD}{FORWARD}x + self.up(x).detach()",
        {},
        "has no backward: no gradient comes to layer.up.weight",
    ),
    (f"{HEAD}{FORWARD}self.up(x.detach())", {}, "has no backward: no gradient comes to its input"),
    (
        f"{HEAD}{FORWARD}self.up(x.view(-1, 3))",
        {},
        "fails forward (line 8: return self.up(x.view(-1, 3)), RuntimeError",
    ),
    (f"{HEAD}{FORWARD}self.up(x).log()", {}, "returns NaN or an infinite value"),
    (
        f"{HEAD}        self.up.bias.requires_grad = False\n{FORWARD}self.up(x)",
        {},
        "does not train layer.up.bias",
    ),
    (
        f"{HEAD}        self.mean = nn.BatchNorm1d(64)\n{FORWARD}self.up(x)",
        {},
        "layer.mean.running_mean is state",
    ),
    (
        HEAD.replace("config, layer_number", "width"),
        {},
        "cannot be made by (config, layer_number) (TypeError",
    ),
    ("Own = 3", {}, "Own is no class of torch.nn.Module"),
    ("class Own(:", {}, "cannot be imported (SyntaxError: invalid syntax"),
    (
        "import nothing_here",
        {},
        "cannot be imported (line 1: import nothing_here, ModuleNotFoundError",
    ),
    (
        "import sys; sys.exit(0)",
        {},
        "cannot be imported (line 1: import sys; sys.exit(0), SystemExit",
    ),
    (f"{HEAD}        self.drop = nn.Dropout(0.1)\n{FORWARD}self.drop(self.up(x))", {}, ""),
    (f"{HEAD}{FORWARD}self.up(x)", {"dp": 2, "zero": 1, **dict.fromkeys(OVERLAPS, True)}, ""),
    (
        f"{HEAD}{FORWARD}self.up(x)",
        {"pp": 2, "first_stage_layers": 1, "recompute": "block", "recompute_layers": 1},
        "",
    ),
]
QK_NORM = (HERE / "own_layers.py").read_text().replace("QKNorm", "Own")
SILENT = QK_NORM.replace(", config.qk_layernorm = squared_relu, True", " = squared_relu")
OLD = version("megatron-core") < "0.18"  # trains it
BAD += [
    (QK_NORM, {"tp": 2, "pp": 2}, ""),
    (
        SILENT,
        {},
        "" if OLD else "has norms of queries and keys, so it must set config.qk_layernorm",
    ),
]
REHEARSE = """
from pathlib import Path
import torch.distributed as dist
from megatron.core import parallel_state
from trilane.config.plan import read_plan
from trilane_engine.model.own_layer import rehearse
for file in sorted(Path(PLACE).glob("*.json")):
    try:
        rehearse(read_plan(file))
        print()
    except ValueError as error:
        print(error)
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_would_not_train_is_one_line_that_names_it(
    ask: Callable, data: Path, tmp_path: Path
) -> None:
    """Tried out in one process, as before a training starts."""
    for number, (source, topology, _) in enumerate(BAD):
        plan = replace(
            own_plan(data, "Mixer", **topology), layer=Layer(name="own.py:Own", source=source)
        )
        (tmp_path / f"{number:02d}.json").write_text(json.dumps(plan.to_json()))
    found = ask(
        small_plan(data), f"PLACE = {str(tmp_path)!r}\n{REHEARSE}", joined=False
    ).splitlines()
    for line, (_, _, rule) in zip(found, BAD, strict=True):
        assert line.startswith(f"layer=own.py:Own: {rule}") if rule else line == "", (line, rule)


@pytest.mark.slow
def test_no_process_starts_for_a_layer_that_cannot_train(data: Path, tmp_path: Path) -> None:
    plan = replace(own_plan(data, "Mixer"), layer=Layer(name="own.py:Own", source=BAD[1][0]))
    folder = run_folder(plan, tmp_path / "run")
    with pytest.raises(ValueError, match=r"^layer=own.py:Own: returns \(63, 2, 64\)"):
        train_local(folder)
    assert [path.name for path in folder.iterdir()] == ["plan.json"]


def test_a_plan_holds_the_text_of_its_layer(data: Path, tmp_path: Path) -> None:
    """All that a run needs: a file that changes later changes no run that is prepared."""
    plan = own_plan(data, "Mixer")
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert f"layer     {plan.layer}; seconds, memory" in plan_report(plan)[1]
    assert len({plan.id, replace(plan, layer=None).id, own_plan(data, "QKNorm").id}) == 3
    (tmp_path / "plan.json").write_text(json.dumps({**plan.to_json(), "layer": "mine.py:Mixer"}))
    (tmp_path / "mine.py").write_text((HERE / "own_layers.py").read_text())
    assert read_plan(tmp_path).layer == Layer(name="mine.py:Mixer", source=plan.layer.source)
    bad = {
        "gone.py:A": r"layer=.*gone.py: no such file",
        "a b": "must be FILE.py:CLASS",
        "mine.py:": "must be",
    }
    for layer, rule in bad.items():
        (tmp_path / "plan.json").write_text(json.dumps({**plan.to_json(), "layer": layer}))
        with pytest.raises(ValueError, match=rule):
            read_plan(tmp_path)
    with pytest.raises(
        ValueError, match=r"layer=own_layers.py:Mixer .*deepspeed-zero trains megatron-core's layer"
    ):
        replace(plan, engine="deepspeed-zero", topology=replace(plan.topology, zero=1))


def defined(cell: str) -> dict[str, type]:
    """As ipykernel compiles a cell: its text is known by the name of a file that does not exist."""
    linecache.cache["cell"] = (len(cell), None, cell.splitlines(keepends=True), "cell")
    names = {"__name__": "__main__", "print": lambda text: None}
    exec(compile(cell, "cell", "exec"), names)
    return names


CELL = """import json
from functools import wraps
WIDTH, DTYPE = -4, json.JSONDecoder
UNUSED = 1
act = lambda x: max(x, 0)
def once(call):
    return wraps(call)(lambda *given: call(*given))
class Base:
    width = WIDTH
class Own(Base):
    @once
    def forward(self, x):
        return act(DTYPE(x))
run = print('trains')
"""


def test_a_class_of_a_notebooks_cell_travels_with_what_it_uses_and_nothing_else() -> None:
    found = layer_of(defined(CELL)["Own"])
    assert found.name == "cell.py:Own"
    names = defined(found.source)
    assert {"json", "wraps", "WIDTH", "DTYPE", "act", "once", "Base", "Own"} <= {*names}
    assert not {"UNUSED", "run"} & {*names}
    assert (
        layer_of(defined(f"# a comment\n{CELL.replace('UNUSED = 1', 'UNUSED = 2')}")["Own"])
        == found
    )
    assert layer_of(json.JSONDecoder) == Layer(name="json.decoder:JSONDecoder")
    with pytest.raises(ValueError, match="has no source here; write it to a file"):
        layer_of(type("Own", (), {"__module__": "__main__"}))


@pytest.mark.parametrize(
    ("before", "line", "missing"),
    [
        ("from torch import nn", "import torch", "nn"),
        ("SCALE = 2", "return SCALE * x", "SCALE"),
        ("import math as m", "return [m.exp(one) for one in x]", "m"),
    ],
)
def test_what_a_class_uses_of_another_cell_is_named(before: str, line: str, missing: str) -> None:
    base = "nn.Module" if missing == "nn" else "object"
    cell = f"class Own({base}):\n    def forward(self, x):\n        {line}\n"
    other: dict[str, object] = {"__name__": "__main__"}
    exec(before, other)
    linecache.cache["other"] = (len(cell), None, cell.splitlines(keepends=True), "other")
    exec(compile(cell, "other", "exec"), other)
    with pytest.raises(
        ValueError,
        match=rf"^layer=Own: uses {missing}, no import, function, class or constant of its",
    ):
        layer_of(other["Own"])
