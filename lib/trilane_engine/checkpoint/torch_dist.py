"""Checkpoints of Megatron-LM, `--ckpt-format torch_dist`, in and out, one tensor at a time:
`trilane convert checkpoint`.

    latest_checkpointed_iteration.txt
    iter_0000100/  metadata.json  common.pt  .metadata  __0_0.distcp

A tensor's name is megatron-core's without the numbers of layer and expert: all layers are one
tensor (layer, ...), all experts (layer, expert, ...), in chunks. Norms before a matrix have the
names of Transformer Engine, which holds both in one module, but for those before experts; gate
and up of a gated MLP stand one above the other. Source: megatron-core 0.16.1, dist_checkpointing
and GPTModel's sharded_state_dict.

Written and read are weights, fp32; an optimizer's state is left, and Adam starts anew. `.metadata`
is a pickle: it is read with every class replaced by one that only holds what it is given, so that a
hostile one runs nothing. common.pt, another, is not read.
"""

import argparse
import io
import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp

from trilane.config.model import ModelShape
from trilane.config.plan import Plan, read_plan
from trilane.utils.files import new_folder, replace_text
from trilane.utils.frozen import frozen
from trilane.utils.tables import one_line
from trilane.utils.validation import print_refusal, read_object, require
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane_engine import patches
from trilane_engine.checkpoint.huggingface import verified
from trilane_engine.checkpoint.slices import assemble, within, write_slices
from trilane_engine.model.parameters import Box, whole_sizes

LATEST = "latest_checkpointed_iteration.txt"
WORD = "embedding.word_embeddings.weight"
# megatron-core's defaults for common.pt
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
MOST_BYTES = 1 << 28  # of .metadata: a chunk has some 150
Sizes = Mapping[str, tuple[int, ...]]
Places = dict[str, tuple[str, Box]]  # canonical name -> Megatron's key, the part of that tensor


@frozen
class Index:
    """The tensors of the checkpoint in `folder`: size and chunks (`box`, `file`, `at`: first byte,
    bytes) by key.
    """

    folder: Path
    sizes: Sizes
    chunks: Mapping[str, list[dict[str, Any]]]


class Held:
    """What a pickle makes of any class: its fields, and nothing that runs."""

    offset = None  # of a MetadataIndex without one

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class Inert(pickle.Unpickler):
    """Reads a pickle without its classes."""

    def find_class(self, module: str, name: str) -> Any:
        """No class of another module is ever imported."""
        return {"Size": tuple, "OrderedDict": dict}.get(name, Held)


def checkpoint_folder(source: Path) -> Path | None:
    """The folder of Megatron's checkpoint: `source`, or the one that its newest iteration is in;
    None: another kind.
    """
    if (source / "metadata.json").is_file():
        return source
    if not (source / LATEST).is_file():
        return None
    word = (source / LATEST).read_text(errors="replace").strip()
    is_name = bool(re.fullmatch(r"\d{1,12}", word))
    require(is_name, LATEST, word, "must be an iteration")
    return source / f"iter_{int(word):07d}"


def read_index(folder: Path) -> Index:
    """What `.metadata` has; ValueError, one line, where it is damaged or of another format."""
    kind = read_object(folder / "metadata.json", "checkpoint").get("sharded_backend")
    rule = f"has sharded_backend {kind}; torch_dist is read"
    require(kind == "torch_dist", "checkpoint", folder, rule)
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = Inert(io.BytesIO(file.read(MOST_BYTES))).load()
        infos = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        sizes: dict[str, tuple[int, ...]] = {}
        chunks: dict[str, list[dict[str, Any]]] = {}
        for key, tensor in metadata.state_dict_metadata.items():
            if hasattr(tensor, "chunks"):
                # a chunk that is named twice could stand for one that is missing
                offsets = {chunk.offsets for chunk in tensor.chunks}
                require(len(offsets) == len(tensor.chunks), "tensor", key, "has a chunk twice")
                sizes[str(key)] = tuple(map(int, tensor.size))
                chunks[str(key)] = [
                    _chunk(chunk, infos[str(key), chunk.offsets]) for chunk in tensor.chunks
                ]
        return Index(folder=folder, sizes=sizes, chunks=chunks)
    except Exception as error:  # whatever a pickle of something else makes of it
        rule = f".metadata cannot be read ({one_line(str(error))})"
    raise ValueError(f"checkpoint={folder}: {rule}")


def _chunk(chunk: Any, info: Any) -> dict[str, Any]:
    name = info.relative_path
    require(bool(re.fullmatch(r"\w[\w.-]*", name)), "file", name, "is no file's name")
    edges = zip(chunk.offsets, chunk.sizes, strict=True)
    return {
        "box": [(first, first + size) for first, size in edges],
        "file": name,
        "at": {"weight": (int(info.offset), int(info.length))},
    }


def place_of(
    name: str, size: tuple[int, ...], shape: ModelShape
) -> tuple[str, tuple[int, ...], Box]:
    """Megatron's key of the canonical parameter `name`, the size of that tensor, and the part of it
    that the parameter is.
    """
    if len(size) == 3:  # gate and up are one matrix
        size = (size[0] * size[1], size[2])
    box = tuple((0, length) for length in size)
    layer = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.+)", name)
    if not layer:
        return name, size, box
    part = layer[3].replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if not shape.experts:  # the router reads its result, too
        part = part.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    expert = re.search(r"(?<=mlp\.experts\.)\d+", part)
    if expert:
        part = part.replace(expert[0], "experts", 1)
        size = (shape.experts, *size)
        number = int(expert[0])
        box = ((number, number + 1), *box)
    number = int(layer[2])
    return layer[1] + part, (shape.num_layers, *size), ((number, number + 1), *box)


def places(index: Index, sizes: Sizes, shape: ModelShape) -> Places:
    """The key of each canonical parameter and its part of that tensor; ValueError where the model
    is another.
    """
    prefix = ""
    for key in index.sizes:
        if re.fullmatch(rf"(model\.|module\.)*{WORD}", key):
            prefix = key.removesuffix(WORD)
    # each layer has its tensors
    are_apart = any(key.startswith(f"{prefix}decoder.layers.0.") for key in index.sizes)
    every: Places = {}
    for name, size in sizes.items():
        key, whole, box = place_of(name, size, shape)
        if are_apart and ".layers." in key:
            key = key.replace(".layers.", f".layers.{box[0][0]}.")
            whole = whole[1:]
            box = box[1:]
        key = prefix + key
        every[name] = (key, box)
        held = index.sizes.get(key, ())
        is_right = held == whole
        if key.endswith((WORD, "output_layer.weight")):  # may have more rows, of padding
            is_right = held[1:] == whole[1:] and held >= whole
        rule = f"has {list(held)} in the checkpoint, {list(whole)} in the plan"
        require(is_right, "tensor", key, rule)
    keys = {key for key, _ in every.values()}
    for key in index.sizes:
        is_ours = key in keys or "optimizer." in key
        require(is_ours, "tensor", key, "is in the checkpoint, and the plan's model has none")
    return every


def common(manifest: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """What Megatron-LM's load_checkpoint() asks of common.pt; it then looks for no optimizer and no
    generators.
    """
    args = argparse.Namespace(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        max_position_embeddings=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=manifest["consumed_samples"],
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": manifest["iteration"]}


def require_alike(shape: ModelShape) -> None:
    """ValueError where layers have different tensors."""
    rule = "layers with and without experts are not converted"
    require(not shape.first_dense, "first_dense", shape.first_dense, rule)


def export(checkpoint: Path, out: Path) -> None:
    """Write the weights of our checkpoint to the new folder `out`; ValueError where megatron-core
    has no such model.
    """
    manifest, shape = verified(checkpoint)
    require(shape.positions != "alibi", "positions", "alibi", "megatron-core has none")
    rule = "megatron-core has no norm of the embedding"
    require(not shape.embedding_layernorm, "embedding_layernorm", True, rule)
    require_alike(shape)
    with new_folder(out) as aside:
        folder = aside / f"iter_{manifest['iteration']:07d}"
        folder.mkdir()
        _write_tensors(checkpoint, manifest, shape, folder)
        torch.save(common(manifest, shape), folder / "common.pt")
        replace_text(folder / "metadata.json", json.dumps(FORMAT))
        replace_text(aside / LATEST, str(manifest["iteration"]))


def _write_tensors(
    checkpoint: Path, manifest: Mapping[str, Any], shape: ModelShape, folder: Path
) -> None:
    """Write one file with a chunk of each layer, and `.metadata`."""
    name_of_file = "__0_0.distcp"
    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    # what a module keeps beside its parameters, of fp8 alone: megatron-core asks for it, and takes
    # None for nothing
    cores = "decoder.layers.self_attention.core_attention._extra_state"
    kept = [f"{cores}/shard_{n}_{shape.num_layers}" for n in range(shape.num_layers)]
    with (folder / name_of_file).open("wb") as file:

        def save(value: object) -> Any:
            first = file.tell()
            torch.save(value, file)
            return patches.stored_at(name_of_file, first, file.tell() - first)

        for name, canonical in whole_sizes(shape).items():
            key, whole, box = place_of(name, canonical, shape)
            slices = manifest["tensors"][name]["slices"]
            value = assemble(checkpoint, slices, "weight", tuple((0, n) for n in canonical))
            value = value.view([end - first for first, end in box])
            kind = dcp.TensorProperties.create_from_tensor(value)
            held = dcp.TensorStorageMetadata(properties=kind, size=torch.Size(whole), chunks=[])
            held = tensors.setdefault(key, held)
            at = torch.Size([first for first, _ in box])
            held.chunks.append(dcp.ChunkStorageMetadata(offsets=at, sizes=value.size()))
            storage[dcp.MetadataIndex(key, at, len(held.chunks) - 1)] = save(value)
            module = key.removesuffix("weight")
            if ".linear_" in key and module != key:
                numbers = ".".join(map(str, at[:-2]))
                kept.append(
                    f"{module}_extra_state/shard_{numbers}_{'.'.join(map(str, whole[:-2]))}"
                )
        nothing = save([None])
    for key in kept:
        tensors[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = nothing
    index = dcp.Metadata(tensors, planner_data={}, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def read_in(source: Path, out: Path, plan: Plan, iteration: int) -> None:
    """Write Megatron's checkpoint `source` as one of the plan to the new folder `out`.

    ValueError where it has another model than the plan, or is damaged.
    """
    require(not plan.layer, "layer", plan.layer, "a layer of your own is not read")
    require_alike(plan.shape)
    index = read_index(source)
    sizes = whole_sizes(plan.shape)
    held = places(index, sizes, plan.shape)

    def values() -> Iterator[torch.Tensor]:
        for name in sizes:
            yield _tensor(index, *held[name])
            for _ in KINDS[1:]:  # the moments
                yield torch.zeros(sizes[name])

    with new_folder(out) as aside:
        folder = aside / checkpoints.FOLDER / ".aside"
        folder.mkdir(parents=True)
        file_name = "rank_00000.safetensors"
        entries = [(f"{name}/{kind}", sizes[name]) for name in sizes for kind in KINDS]
        begins, file = write_slices(folder / file_name, entries, values())
        tensors = {}
        for name, size in sizes.items():
            at = {kind: begins[f"{name}/{kind}"] for kind in KINDS}
            whole = {"box": [(0, n) for n in size], "file": file_name, "at": at}
            tensors[name] = {"shape": size, "slices": [whole]}
        manifest = {
            "iteration": iteration,
            "consumed_samples": plan.run.ramp.consumed(iteration, plan.topology.gbs),
            "identity": identity(plan),
            "layout": None,  # no plan's generators are in it
            "scalars": {"step": 0.0},
            "files": {file_name: file},
            "tensors": tensors,
        }
        checkpoints.write_manifest(folder, manifest)
        checkpoints.publish(folder, folder.with_name(checkpoints.name_of(iteration)))


def _tensor(index: Index, key: str, box: Box) -> torch.Tensor:
    """The part `box` of a tensor, fp32; ValueError that names the tensor where a chunk
    is damaged.
    """
    try:
        return assemble(index.folder, index.chunks[key], "weight", box, _read_saved)
    except Exception as error:  # whatever a damaged archive makes of torch.load
        why = type(error).__name__  # torch's own text would advise to run a pickle
        raise ValueError(f"tensor={key}: a chunk cannot be read ({why})") from None


def _read_saved(
    path: Path, at: Any, held: Box, wanted: Sequence[tuple[int, int]], target: np.ndarray
) -> None:
    """Read the part `wanted` of the chunk `held`, which torch.save() wrote at `at`, (first byte,
    bytes).
    """
    with path.open("rb") as file:
        file.seek(at[0])
        value = torch.load(io.BytesIO(file.read(at[1])), map_location="cpu", weights_only=True)
    size = list(value.shape)
    require(size == [b - a for a, b in held], "size", size, "is another in .metadata")
    target[...] = value[within(wanted, held)].float().numpy()


def main(argv: list[str]) -> int:
    """SOURCE, OUT and the plan ("": none); 2 with one line where it fails."""
    source, out, plan = argv
    try:
        if folder := checkpoint_folder(Path(source)):
            rule = "a checkpoint of Megatron needs --plan, which has its model"
            require(bool(plan), "plan", "missing", rule)
            number = re.fullmatch(r"iter_(\d{7,12})", folder.name)
            at = int(number[1]) if number else 0
            read_in(folder, Path(out), read_plan(plan), at)
            print("trilane: weights only: Adam starts anew", file=sys.stderr)
        else:
            ours = checkpoints.found_in(Path(source))
            rule = "holds no complete checkpoint of trilane, none of torch_dist"
            require(bool(ours), "checkpoint", source, rule)
            export(ours[-1], Path(out))
        print(out)
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
