"""Checkpoints of Megatron-LM in and out, one tensor at a time: `trilane convert checkpoint`; see
interop/torch_dist.py.

Written are weights, fp32. Read are weights and, where they stand beside them whole
(`optimizer.state.exp_avg...`), the fp32 master and Adam's moments; other forms, as a distributed
optimizer has them, are left: Adam then starts anew.
"""

import io
import itertools
import json
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp

from trilane.config.model import ModelShape
from trilane.config.plan import Plan, read_plan
from trilane.interop import torch_dist as megatron
from trilane.utils.files import new_folder, replace_text
from trilane.utils.tables import one_line
from trilane.utils.validation import require
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane_engine import patches
from trilane_engine.checkpoint.huggingface import verified
from trilane_engine.checkpoint.slices import assemble, write_slices
from trilane_engine.model.parameters import Box, whole_sizes


def export(checkpoint: Path, out: Path) -> None:
    """Write the weights of our checkpoint to the new folder `out`; ValueError where megatron-core
    has no such model.
    """
    manifest, shape = verified(checkpoint)
    require(shape.positions != "alibi", "positions", "alibi", "megatron-core has none")
    require(
        not shape.embedding_layernorm,
        "embedding_layernorm",
        True,
        "megatron-core has no norm of the embedding",
    )
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
    name_of_file, tensors = "__0_0.distcp", dict[str, Any]()
    storage = dict[dcp.MetadataIndex, Any]()
    with (folder / name_of_file).open("wb") as file:

        def save(value: object) -> Any:
            first = file.tell()
            torch.save(value, file)
            return patches.stored_at(name_of_file, first, file.tell() - first)

        for name, size in whole_sizes(shape).items():
            (key, layer), box = megatron.place_of(name), tuple((0, n) for n in size)
            at, whole = ([], []) if layer is None else ([layer], [shape.num_layers])
            value = assemble(checkpoint, manifest["tensors"][name]["slices"], "weight", box)
            value = value.view(*[1 for _ in at], *megatron.flat(size))
            kind, sizes = (
                dcp.TensorProperties.create_from_tensor(value),
                torch.Size([*whole, *megatron.flat(size)]),
            )
            held = tensors.setdefault(
                key, dcp.TensorStorageMetadata(properties=kind, size=sizes, chunks=[])
            )
            offsets = torch.Size([*at, *[0 for _ in megatron.flat(size)]])
            held.chunks.append(dcp.ChunkStorageMetadata(offsets=offsets, sizes=value.size()))
            storage[dcp.MetadataIndex(key, offsets, len(held.chunks) - 1)] = save(value)
        nothing = save([None])
    for module, layer in itertools.product(megatron.MODULES, range(shape.num_layers)):
        key = f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.num_layers}"
        tensors[key], storage[dcp.MetadataIndex(key)] = dcp.BytesStorageMetadata(), nothing
    (folder / ".metadata").write_bytes(
        pickle.dumps(dcp.Metadata(tensors, planner_data={}, storage_data=storage))
    )


def read_in(source: Path, out: Path, plan: Plan, iteration: int) -> str:
    """Write Megatron's checkpoint `source` as one of the plan to the new folder `out`; what was
    read, in words.

    ValueError where it has another model than the plan, or is damaged.
    """
    require(not plan.layer, "layer", plan.layer, "a layer of your own is not read")
    index, sizes = megatron.read_index(source), whole_sizes(plan.shape)
    places = megatron.places(index, sizes, plan.shape.num_layers)
    keys = {name: megatron.by_kind(index, key) for name, (key, _) in places.items()}
    complete = all(len(of) == len(KINDS) for of in keys.values())
    with new_folder(out) as aside:
        (folder := aside / checkpoints.FOLDER / ".aside").mkdir(parents=True)
        file_name, tensors = "rank_00000.safetensors", {}
        entries = [(name, kind) for name in sizes for kind in KINDS]
        held = (
            _tensor(index, keys[n][k], places[n][1])
            if k == "weight" or complete
            else torch.zeros(sizes[n])
            for n, k in entries
        )
        begins, file = write_slices(
            folder / file_name, [(f"{n}/{k}", sizes[n]) for n, k in entries], held
        )
        for name, size in sizes.items():
            at = {kind: begins[f"{name}/{kind}"] for kind in KINDS}
            tensors[name] = {
                "shape": size,
                "slices": [{"box": [(0, n) for n in size], "file": file_name, "at": at}],
            }
        files = {file_name: file}
        progress = {
            "iteration": iteration,
            "consumed_samples": plan.run.ramp.consumed(iteration, plan.topology.gbs),
        }
        # `layout` None: no plan's generators are in it
        rest = {
            "identity": identity(plan),
            "layout": None,
            "scalars": {"step": float(iteration * complete)},
        }
        checkpoints.write_manifest(folder, {**progress, **rest, "files": files, "tensors": tensors})
        checkpoints.publish(folder, folder.with_name(checkpoints.name_of(iteration)))
    return "weights and Adam's moments" if complete else "weights only: Adam starts anew"


def _tensor(index: megatron.Index, key: str, box: Box) -> torch.Tensor:
    """The part `box` of a tensor, fp32; ValueError that names the tensor where a chunk is damaged."""
    try:
        return assemble(index.folder, index.chunks[key], "weight", box, _read_saved)
    except Exception as error:  # whatever a damaged archive makes of torch.load
        # torch's own words would advise to run the pickle
        why = (
            "holds more than a tensor"
            if isinstance(error, pickle.UnpicklingError)
            else one_line(str(error))
        )
        raise ValueError(f"tensor={key}: a chunk cannot be read ({why})") from None


def _read_saved(
    path: Path, at: Any, held: Box, wanted: Sequence[tuple[int, int]], target: np.ndarray
) -> None:
    """Read the part `wanted` of the chunk `held`, which torch.save() wrote at `at`, (first byte,
    bytes).
    """
    with path.open("rb") as file:
        file.seek(at[0])
        found = torch.load(io.BytesIO(file.read(at[1])), map_location="cpu", weights_only=True)
    require(
        list(found.shape) == [b - a for a, b in held],
        "size",
        list(found.shape),
        "is another in .metadata",
    )
    here = tuple(
        slice(first - c, end - c) for (first, end), (c, _) in zip(wanted, held, strict=True)
    )
    target[...] = found[here].float().numpy()


def main(argv: list[str]) -> int:
    """SOURCE, OUT, the plan ("": none) and the iteration (-1: the folder's); 2 with one line where
    it fails.
    """
    source, out, plan, iteration = argv
    try:
        if folder := megatron.checkpoint_folder(Path(source)):
            require(
                bool(plan),
                "plan",
                "missing",
                "a checkpoint of Megatron needs --plan, which has its model",
            )
            number = re.fullmatch(r"iter_(\d{7,12})", folder.name)
            at = int(iteration) if int(iteration) >= 0 else int(number[1]) if number else 0
            print(f"trilane: {read_in(folder, Path(out), read_plan(plan), at)}", file=sys.stderr)
        else:
            ours = checkpoints.found_in(Path(source))
            require(
                bool(ours),
                "checkpoint",
                source,
                "holds no complete checkpoint of trilane, none of torch_dist",
            )
            export(ours[-1], Path(out))
        print(out)
    except ValueError as error:
        print("trilane:", one_line(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
