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
from plans import LLAMA, SHAPE, changed, run_folder, small_plan
from test_hf_export import BLOOM, checkpoint

from trilane.config.model import ModelShape
from trilane.interop.torch_dist import WORD
from trilane.workspace.checkpoints import KINDS, read_manifest

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
if MOMENTS:
    for kind in ("exp_avg", "exp_avg_sq"):
        for key, tensor in model.sharded_state_dict().items():
            if hasattr(tensor, "data") and hasattr(tensor, "key"):
                same = {"key": f"optimizer.state.{kind}.{tensor.key}"}
                data = {} if tensor.data is None else {"data": tensor.data.float() * (2 if kind == "exp_avg" else 3)}
                sharded[f"{kind}.{key}"] = replace(tensor, **same, **data)
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
WIDE = {"tp": 2, "pp": 2}


def trained(plan, fork: Callable, folder: Path) -> Path:
    """The folder of a run that saves at its end."""
    run_folder(changed(plan, "run", save_interval=plan.run.train_iters), folder)
    fork(plan.topology.gpus, folder)
    return folder


def converted(*words: object) -> int:
    """`trilane convert checkpoint`, in this process."""
    from trilane_engine.checkpoint.torch_dist import main

    return main([*map(str, words), *["", "-1"][len(words) - 2 :]])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["GPT-2", "Llama"])
def test_megatron_core_loads_what_we_write(
    shape: ModelShape, fork: Callable, ask: Callable, data: Path, tmp_path: Path
) -> None:
    """Its own dist_checkpointing.load, TP 2 and PP 2, of a checkpoint that one process trained: one
    loss.
    """
    run = trained(small_plan(data, iters=2, source="mock", shape=shape), fork, tmp_path / "run")
    assert converted(run, tmp_path / "out") == 0
    wide = small_plan(data, source="mock", shape=shape, **WIDE)
    found = ask(wide, f"PATH = {str(tmp_path / 'out/iter_0000002')!r}\n{MODEL}{LOAD}").split()
    assert set(found[::2]) == {"2"}
    assert max(map(float, found[1::2])) == pytest.approx(loss_of(run, ask, data, shape), abs=1e-6)


def loss_of(run: Path, ask: Callable, data: Path, shape: ModelShape) -> float:
    """The loss of the first batch by one process that has loaded the run's checkpoint."""
    return float(
        ask(small_plan(data, source="mock", shape=shape), f"PATH = {str(run)!r}\n{MODEL}{OURS}")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "moments"), [(SHAPE, True), (LLAMA, False)], ids=["with moments", "weights only"]
)
def test_what_megatron_core_saves_is_read(
    shape: ModelShape,
    moments: bool,
    ask: Callable,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """By its dist_checkpointing.save on TP 2 and PP 2; the moments planted as twice and three times
    the weight.
    """
    import torch

    plan = small_plan(data, source="mock", shape=shape)
    source = tmp_path / "megatron/iter_0000007"
    code = f"PATH, MOMENTS = {str(source)!r}, {moments}\n{MODEL}{SAVE}"
    (before,) = {
        float(line)
        for line in ask(small_plan(data, source="mock", shape=shape, **WIDE), code).split()
    } - {0}
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert converted(source.parent, tmp_path / "ours", tmp_path / "plan.json") == 0
    assert ("moments" in capsys.readouterr().err.split("only")[0]) == moments
    assert loss_of(tmp_path / "ours", ask, data, shape) == pytest.approx(before, abs=1e-6)
    manifest = read_manifest(tmp_path / "ours/checkpoints/iter_0000007")
    assert manifest["scalars"] == {"step": 7.0 * moments}
    from trilane_engine.checkpoint.slices import assemble

    for tensor in manifest["tensors"].values():
        box = tuple((0, n) for n in tensor["shape"])
        of = [
            assemble(tmp_path / "ours/checkpoints/iter_0000007", tensor["slices"], kind, box)
            for kind in KINDS
        ]
        assert torch.equal(of[1], 2.0 * moments * of[0]) and torch.equal(
            of[2], 3.0 * moments * of[0]
        )


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


def twice(tensors: dict, storage: dict, folder: Path) -> None:
    """Half of the embedding two times, which is as many numbers as the whole has."""
    import torch

    held, rows = tensors[WORD], torch.zeros(256, 64)
    place = append(folder / "__0_0.distcp", rows)
    held.chunks = [replace(held.chunks[0], sizes=rows.size())] * 2
    (info,) = (info for index, info in storage.items() if index.fqn == WORD)
    info.offset, info.length = place


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
BAD = {
    "another width": (
        lambda at: None,
        {"hidden_size": 128},
        "tensor=embedding.word_embeddings.weight: has [512, 64]",
    ),
    "more layers": (
        lambda at: None,
        {"num_layers": 6},
        "tensor=decoder.layers.self_attention.linear_qkv.layer_norm_w",
    ),
    "more rows": (
        lambda at: None,
        {"vocab_size": 640},
        "tensor=embedding.word_embeddings.weight: has [512, 64]",
    ),
    "no biases": (
        lambda at: None,
        {"biases": "none"},
        "tensor=decoder.layers.self_attention.linear_qkv.bias: is in",
    ),
    "untied": (
        lambda at: None,
        {"tied_embeddings": False},
        "tensor=output_layer.weight: is in the plan's model, and",
    ),
    "truncated": (cut, {}, "tensor=decoder.layers."),
    "no data": (
        lambda at: (at / "__0_0.distcp").unlink(),
        {},
        "tensor=embedding.word_embeddings.weight: a chunk",
    ),
    "another folder's": (
        elsewhere,
        {},
        "checkpoint=AT: .metadata cannot be read (file=../../secret",
    ),
    "no index": (
        lambda at: (at / ".metadata").unlink(),
        {},
        "checkpoint=AT: .metadata: No such file",
    ),
    "no pickle": (
        lambda at: (at / ".metadata").write_bytes(b"{}"),
        {},
        "checkpoint=AT: .metadata cannot be read",
    ),
    "zarr": (
        lambda at: (at / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        {},
        "checkpoint=AT: has sh",
    ),
    "a chunk twice": (
        reindexed(twice),
        {},
        "checkpoint=AT: .metadata cannot be read (tensor=embedding.word_emb",
    ),
    "a command as tensor": (
        reindexed(command),
        {},
        "tensor=embedding.word_embeddings.weight: a chunk cannot be read (ho",
    ),
    "no size": (
        reindexed(lambda tensors, *_: setattr(tensors[WORD], "size", None)),
        {},
        "checkpoint=AT: .metadata cannot be read",
    ),
    "a command": (
        lambda at: (at / ".metadata").write_bytes(pickle.dumps(Command(at / "ran"))),
        {},
        "checkpoint=AT: .metadata cannot be read",
    ),
}


@pytest.mark.parametrize(("change", "fields", "message"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_of_megatron_is_one_line_and_runs_nothing(
    change: Callable, fields: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
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


def test_what_cannot_be_converted_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    checkpoint(BLOOM, tmp_path / "bloom")
    checkpoint(SHAPE, tmp_path / "good")
    assert converted(tmp_path / "good", tmp_path / "megatron") == 0
    for source, rule in [
        ("empty", "checkpoint=.*: holds no complete checkpoint of trilane"),
        ("bloom", "positions=alibi: megatron-core has none"),
        ("megatron", "plan=missing: a checkpoint of Megatron needs --plan"),
    ]:
        assert converted(tmp_path / source, tmp_path / "out") == 2
        assert re.match(f"(?s).*trilane: {rule}[^\n]*\n$", capsys.readouterr().err)
