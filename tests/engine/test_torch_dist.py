"""Megatron-Core's torch_dist checkpoints are ours under other names: megatron-core itself saves and
loads them here.
"""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from parity import SHARED
from plans import LLAMA, SHAPE, changed, run_folder, small_plan
from test_hf_export import BLOOM, checkpoint

from trilane.config.model import ModelShape
from trilane.workspace.checkpoints import read_manifest
from trilane_engine.checkpoint.torch_dist import WORD

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

# Real models of TP 2 and PP 2: `loss` of the plan's first batch, after megatron-core has loaded, or
# before it saves.
MODEL = """
import torch
from megatron.core import dist_checkpointing
from trilane_engine.backends.base import build
from trilane_engine.data.samples import SampleLoader

engine = build(plan, world)
(model,) = engine.modules
model = getattr(model, "module", model)
for layer in model.decoder.layers:  # as Transformer Engine has it
    if plan.shape.experts:
        layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)

def loss():
    batch = next(iter(plan.batches()))
    return engine.evaluate(SampleLoader(plan, world, engine.replica).microbatches(batch))
"""
LOAD = """
sharded = {"model": model.sharded_state_dict()}
loaded = dist_checkpointing.load(sharded, PATH)
model.load_state_dict(loaded["model"])
print(loaded["iteration"], loss())
"""
SAVE = """
from dataclasses import replace
from pathlib import Path
sharded = model.sharded_state_dict()
for key, tensor in model.sharded_state_dict().items():
    if hasattr(tensor, "data") and hasattr(tensor, "key"):
        sharded[f"exp_avg.{key}"] = replace(tensor, key=f"optimizer.state.exp_avg.{tensor.key}")
if world.is_first:
    Path(PATH).mkdir(parents=True)
    Path(PATH).parent.joinpath("latest_checkpointed_iteration.txt").write_text("7")
world.barrier()
dist_checkpointing.save({"model": sharded, "iteration": 7}, PATH)
from megatron.core.dist_checkpointing.strategies import filesystem_async
filesystem_async._results_queue._manager.shutdown()  # it outlives a rank that leaves without its exit handlers
print(loss())
"""
OURS = """
from pathlib import Path
from dataclasses import replace
from trilane_engine.checkpoint.load import find, load
found = find(Path(PATH), plan, world)
load(found, plan, world, engine)
print(loss())
"""
SHAPES = {
    "llama": (LLAMA, {"tp": 2, "pp": 2}),
    "experts": (
        replace(SHARED, first_dense=0),
        {"tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True},
    ),
}


def converted(*words: object) -> int:
    """`trilane convert checkpoint`, in this process."""
    from trilane_engine.checkpoint.torch_dist import main

    return main([*map(str, words), *[""][len(words) - 2 :]])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "wide"), SHAPES.values(), ids=SHAPES)
def test_megatron_core_loads_what_we_write(shape, wide, fork, ask, data, tmp_path):
    """Its own dist_checkpointing.load, TP 2 and PP 2, of a checkpoint that one process trained: one
    loss.
    """
    run = tmp_path / "run"
    plan = small_plan(data, iters=2, source="mock", shape=shape)
    run_folder(changed(plan, "run", save_interval=2), run)
    fork(1, run)
    assert converted(run, tmp_path / "out") == 0
    several = small_plan(data, source="mock", shape=shape, **wide)
    path = f"{tmp_path}/out/iter_0000002"
    answer = ask(several, f"PATH = {path!r}\n{MODEL}{LOAD}").split()
    assert set(answer[::2]) == {"2"}
    assert max(map(float, answer[1::2])) == pytest.approx(loss_of(run, ask, data, shape), abs=1e-6)


def loss_of(run: Path, ask: Callable, data: Path, shape: ModelShape) -> float:
    """The loss of the first batch by one process that has loaded the run's checkpoint."""
    plan = small_plan(data, source="mock", shape=shape)
    return float(ask(plan, f"PATH = {str(run)!r}\n{MODEL}{OURS}"))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "wide"), SHAPES.values(), ids=SHAPES)
def test_what_megatron_core_saves_is_read(shape, wide, ask, data, tmp_path, capsys):
    """By its dist_checkpointing.save on TP 2 and PP 2; an optimizer's state is left."""
    plan = small_plan(data, source="mock", shape=shape)
    source = tmp_path / "megatron/iter_0000007"
    several = small_plan(data, source="mock", shape=shape, **wide)
    answer = ask(several, f"PATH = {str(source)!r}\n{MODEL}{SAVE}")
    (before,) = {float(line) for line in answer.split()} - {0}
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert converted(source.parent, tmp_path / "ours", tmp_path / "plan.json") == 0
    assert "Adam starts anew" in capsys.readouterr().err
    assert loss_of(tmp_path / "ours", ask, data, shape) == pytest.approx(before, abs=1e-6)
    manifest = read_manifest(tmp_path / "ours/checkpoints/iter_0000007")
    assert manifest["scalars"] == {"step": 0.0}


class Command:
    """A pickle of it runs a command where it is read as pickles are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def cut(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9000])


def elsewhere(folder: Path) -> None:
    (folder / ".metadata").write_bytes(
        (folder / ".metadata").read_bytes().replace(b"__0_0.distcp", b"../../secret")
    )


def reindexed(change: Callable) -> Callable:
    """What changes the index as Python has it: `change(tensors, storage, folder)`."""

    def apply(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        change(index.state_dict_metadata, index.storage_data, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return apply


def command(tensors: dict, storage: dict, folder: Path) -> None:
    (info,) = (info for index, info in storage.items() if index.fqn == WORD)
    info.offset, info.length = append(folder / "__0_0.distcp", Command(folder / "ran"))


def append(file: Path, value: object) -> tuple[int, int]:
    """First byte and bytes of what torch.save() appends to the file."""
    import torch

    first = file.stat().st_size
    with file.open("ab") as end:
        torch.save(value, end)
    return first, file.stat().st_size - first


# what is done to a good checkpoint of iteration 5, fields of the plan's shape -> the beginning of
# the one line
EMBEDDING = "tensor=embedding.word_embeddings.weight"
UNREADABLE = "checkpoint=AT: .metadata cannot be read"
BAD = {
    "another width": (lambda at: None, {"hidden_size": 128}, f"{EMBEDDING}: has [512, 64]"),
    "truncated": (cut, {}, "tensor=decoder.layers."),
    "another folder's": (elsewhere, {}, f"{UNREADABLE} (file=../../secret"),
    "a command as tensor": (reindexed(command), {}, f"{EMBEDDING}: a chunk cannot be read (Un"),
    "a command": (
        lambda at: (at / ".metadata").write_bytes(pickle.dumps(Command(at / "ran"))),
        {},
        UNREADABLE,
    ),
}


@pytest.mark.parametrize(("change", "fields", "message"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_of_megatron_is_one_line_and_runs_nothing(
    change: Callable, fields: dict, message: str, tmp_path, capsys
):
    checkpoint(SHAPE, tmp_path / "good")
    assert converted(tmp_path / "good", tmp_path / "megatron") == 0
    folder = tmp_path / "megatron/iter_0000005"
    change(folder)
    plan = small_plan(tmp_path, shape=replace(SHAPE, **fields))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    capsys.readouterr()
    assert converted(tmp_path / "megatron", tmp_path / "ours", tmp_path / "plan.json") == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith(f"trilane: {message.replace('AT', str(folder))}")
        and printed.count("\n") == 1
    )
    assert not (folder / "ran").exists() and not (tmp_path / "ours").exists()


def test_what_cannot_be_converted_is_one_line(tmp_path, capsys):
    checkpoint(BLOOM, tmp_path / "bloom")
    checkpoint(SHAPE, tmp_path / "good")
    assert converted(tmp_path / "good", tmp_path / "megatron") == 0
    for source, rule in [
        ("bloom", "positions=alibi: megatron-core has none"),
        ("megatron", "plan=missing: a checkpoint of Megatron needs --plan"),
    ]:
        assert converted(tmp_path / source, tmp_path / "out") == 2
        assert re.match(f"(?s).*trilane: {rule}[^\n]*\n$", capsys.readouterr().err)
