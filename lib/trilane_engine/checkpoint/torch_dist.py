"""Checkpoints of Megatron-LM in and out, one tensor at a time: `trilane convert checkpoint`; see
megatron_index.py.

Written and read are weights, fp32; an optimizer's state is left, and Adam starts anew.
"""

import io
import itertools
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
from trilane.utils.validation import print_refusal, require
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane_engine import patches
from trilane_engine.checkpoint import megatron_index as megatron
from trilane_engine.checkpoint.huggingface import verified
from trilane_engine.checkpoint.slices import assemble, within, write_slices
from trilane_engine.model.parameters import Box, whole_sizes


def export(checkpoint: Path, out: Path) -> None:
    """Write the weights of our checkpoint to the new folder `out`; ValueError where megatron-core
    has no such model.
    """
    manifest, shape = verified(checkpoint)
    require(shape.positions != "alibi", "positions", "alibi", "megatron-core has none")
    rule = "megatron-core has no norm of the embedding"
    require(not shape.embedding_layernorm, "embedding_layernorm", True, rule)
    with new_folder(out) as aside:
        folder = aside / f"iter_{manifest['iteration']:07d}"
        folder.mkdir()
        _write_tensors(checkpoint, manifest, shape, folder)
        torch.save(megatron.common(manifest, shape), folder / "common.pt")
        replace_text(folder / "metadata.json", json.dumps(megatron.FORMAT))
        replace_text(aside / megatron.LATEST, str(manifest["iteration"]))


def _write_tensors(
    checkpoint: Path, manifest: Mapping[str, Any], shape: ModelShape, folder: Path
) -> None:
    """Write one file with a chunk of each layer, and `.metadata`."""
    name_of_file = "__0_0.distcp"
    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    with (folder / name_of_file).open("wb") as file:

        def save(value: object) -> Any:
            first = file.tell()
            torch.save(value, file)
            return patches.stored_at(name_of_file, first, file.tell() - first)

        for name, canonical in whole_sizes(shape).items():
            key, layer = megatron.place_of(name)
            slices = manifest["tensors"][name]["slices"]
            value = assemble(checkpoint, slices, "weight", tuple((0, n) for n in canonical))
            size = megatron.flat(canonical)
            offsets = [0 for _ in size]
            whole = [*size]
            value = value.view(*size)
            if layer is not None:
                offsets.insert(0, layer)
                whole.insert(0, shape.num_layers)
                value = value[None]
            kind = dcp.TensorProperties.create_from_tensor(value)
            held = dcp.TensorStorageMetadata(properties=kind, size=torch.Size(whole), chunks=[])
            held = tensors.setdefault(key, held)
            at = torch.Size(offsets)
            held.chunks.append(dcp.ChunkStorageMetadata(offsets=at, sizes=value.size()))
            storage[dcp.MetadataIndex(key, at, len(held.chunks) - 1)] = save(value)
        nothing = save([None])
    for module, layer in itertools.product(megatron.MODULES, range(shape.num_layers)):
        key = f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.num_layers}"
        tensors[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = nothing
    index = dcp.Metadata(tensors, planner_data={}, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def read_in(source: Path, out: Path, plan: Plan, iteration: int) -> None:
    """Write Megatron's checkpoint `source` as one of the plan to the new folder `out`.

    ValueError where it has another model than the plan, or is damaged.
    """
    require(not plan.layer, "layer", plan.layer, "a layer of your own is not read")
    index = megatron.read_index(source)
    sizes = whole_sizes(plan.shape)
    places = megatron.places(index, sizes, plan.shape.num_layers)

    def values() -> Iterator[torch.Tensor]:
        for name in sizes:
            yield _tensor(index, *places[name])
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


def _tensor(index: megatron.Index, key: str, box: Box) -> torch.Tensor:
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
        if folder := megatron.checkpoint_folder(Path(source)):
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
