"""A checkpoint as a folder of Hugging Face's transformers, and back: GPT-2, BLOOM, Llama and their like.

`trilane convert huggingface CHECKPOINT OUT` writes the weights (fp32, one file at a time in memory) and a config.json
for `from_pretrained(OUT)`. `... --back FOLDER OUT` makes of such a folder a checkpoint of iteration 0 with zero Adam
moments, for `run.load`. The families: config/hf_families.py.

Canonical: a matrix is (out, in); the rows of `linear_qkv` go by group of heads that share keys and values: (group, its
queries ... | key | value, channel); a gated `linear_fc1` is (gate | up, channel, in). Where a family keeps such parts
apart, its table has a name for each; where it joins them, kind after kind. Rotary positions turn channels i and i + D/2
of a head, in megatron-core and in transformers alike, so that no channel moves. The conversions are permutations, valid
for an optimizer's moments as well as for weights.
"""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trilane.config.hf_families import HEAD, Family, families, family_of
from trilane.config.model import ModelShape
from trilane.config.shapes import rotary_departures, shape_of_config
from trilane.engine.checkpoint.slices import SliceFile, assemble
from trilane.engine.model.parameters import whole_sizes
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line, short
from trilane.utils.validation import from_mapping, read_object, require, require_known, to_mapping
from trilane.workspace import checkpoints

INDEX = "model.safetensors.index.json"


def theirs(family: Family, name: str, tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """The tensors of their_names() of the canonical parameter `name`; they share memory where nothing moves."""
    parts = [tensor]
    if "linear_qkv." in name and not family.by_group:
        rows = tensor.unflatten(0, (shape.kv_heads, -1, shape.head_dim))
        parts = [part.flatten(0, 2) for part in rows.split([rows.shape[1] - 2, 1, 1], 1)]
    elif "linear_fc1." in name and shape.is_gated:
        parts = list(tensor)
    if len(family.their_names(name)) < len(parts):
        parts = [torch.cat(parts)]
    return [part.t().contiguous() if _is_turned(family, name) else part for part in parts]


def ours(family: Family, name: str, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """The inverse of theirs()."""
    parts = [part.t().contiguous() if _is_turned(family, name) else part for part in tensors]
    if "linear_qkv." in name and not family.by_group:
        keys = shape.kv_heads * shape.head_dim
        separate = parts if len(parts) == 3 else parts[0].split([shape.hidden_size, keys, keys])
        rows = [part.unflatten(0, (shape.kv_heads, -1, shape.head_dim)) for part in separate]
        return torch.cat(rows, 1).flatten(0, 2)
    if "linear_fc1." in name and shape.is_gated:
        return torch.stack(parts) if len(parts) == 2 else parts[0].view(2, shape.ffn, *parts[0].shape[1:])
    return parts[0]


def _is_turned(family: Family, name: str) -> bool:
    return family.transposed and ".linear_" in name and name.endswith(".weight")


def _meta(family: Family, shape: ModelShape) -> dict[str, tuple[str, int, torch.Tensor]]:
    """Their name of each tensor -> our name, the place among its parts, and the tensor without memory."""
    found = {}
    for name, size in whole_sizes(shape).items():
        parts = theirs(family, name, torch.empty(size, device="meta"), shape)
        for place, (own, part) in enumerate(zip(family.their_names(name), parts, strict=True)):
            found[own] = (name, place, part)
    return found


def export(checkpoint: Path, out: Path, vocab_size: int = 0, most_bytes: int = 10**10) -> None:
    """Write the checkpoint's weights and sizes to the new folder `out`; ValueError where it cannot be exported.

    `vocab_size` above 0 leaves out the rows of the embedding behind so many, which padding added. A file has at most
    `most_bytes`, or one tensor that is larger.
    """
    manifest = checkpoints.read_manifest(checkpoint)
    for name, (size, checksum) in manifest.get("files", {}).items():
        problem = checkpoints.fault(checkpoint, name, size, checksum)
        require(problem is None, "checkpoint", checkpoint, str(problem))
    trained = from_mapping(ModelShape, manifest.get("identity", {}).get("shape"), "shape")
    family, tensors = family_of(trained), manifest.get("tensors", {})
    held, sizes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}, whole_sizes(trained)
    wrong = min((name for name in held | sizes if held.get(name) != sizes.get(name)), default="")
    has, means = held.get(wrong, "no such tensor"), sizes.get(wrong, "none")
    require(not wrong, "tensor", wrong, f"{checkpoint.name} has {has}, its model {means}")
    rule = f"the checkpoint has {trained.vocab_size} rows"
    require(vocab_size <= trained.vocab_size, "vocab_size", vocab_size, rule)
    shape = dataclasses.replace(trained, vocab_size=vocab_size or trained.vocab_size)
    require(not out.exists(), "out", out, "exists")
    meta, whole = _meta(family, shape), whole_sizes(shape)
    split = split_torch_state_dict_into_shards(
        {own: part for own, (_, _, part) in meta.items()},
        max_shard_size=most_bytes,
        filename_pattern="model{suffix}.safetensors",
    )
    out.mkdir(parents=True)
    for file, names in split.filename_to_tensors.items():
        weights: dict[str, list[torch.Tensor]] = {}
        for name in dict.fromkeys(meta[own][0] for own in names):
            box = tuple((0, n) for n in whole[name])
            tensor = assemble(checkpoint, tensors[name]["slices"], "weight", box)
            weights[name] = theirs(family, name, tensor, shape)
        values = {own: weights[meta[own][0]][meta[own][1]].contiguous() for own in names}
        try:
            save_file(values, out / file, metadata={"format": "pt"})  # which transformers requires
        except SafetensorError as error:
            require(False, "out", out, str(error))
    if split.is_sharded:
        index = {"metadata": {"total_size": 4 * shape.parameters}, "weight_map": split.tensor_to_filename}
        replace_text(out / INDEX, json.dumps(index))
    replace_text(out / "config.json", json.dumps(family.config(shape), indent=2) + "\n")


def import_folder(folder: Path, out: Path, seq_length: int = 0, vocab_size: int = 0) -> Path:
    """Write a checkpoint of iteration 0 below `out` from a folder of transformers; its path. ValueError for others.

    `seq_length` above 0 takes the place of the longest that the model takes (not with learned positions); `vocab_size`
    above 0 pads the embedding with rows of zeros.
    """
    family, own = read_config(folder, seq_length)
    require(not vocab_size or vocab_size >= own.vocab_size, "vocab_size", vocab_size, f"{folder} has {own.vocab_size}")
    shape = dataclasses.replace(own, vocab_size=vocab_size or own.vocab_size)
    target = out / checkpoints.name_of(0)
    require(not target.exists(), "out", target, "exists")
    temporary = out / f".{target.name}.import"
    try:
        with ExitStack() as stack:
            tensors = Tensors(folder, family, own, stack)
            temporary.mkdir(parents=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)  # once published it is gone
            written = _write(temporary, tensors, whole_sizes(shape))
            checkpoints.write_manifest(temporary, {**written, "identity": {"shape": to_mapping(shape)}})
            checkpoints.publish(temporary, target)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"folder={folder}: its tensors cannot be read ({short(str(error))})") from None
    return target


def read_config(folder: Path, seq_length: int = 0) -> tuple[Family, ModelShape]:
    """The family and shape of the folder's config.json; ValueError for what our model does not compute."""
    given = read_object(folder / "config.json", "folder")
    require_known("model_type", str(given.get("model_type")), families())
    family, shape = families()[given["model_type"]], shape_of_config(given, seq_length).shape
    for departure in filter(None, (family.misfit(shape), *rotary_departures(given))):
        require(False, *departure)
    for key, value in family.settings.items():
        require(given.get(key, value) == value, key, given.get(key), f"a model here has {value}")
    require(not given.get("quantization_config"), "quantization_config", "given", "weights are not quantized here")
    return family, shape


class Tensors:
    """The tensors of a folder's safetensors files by canonical name; none is read before it is asked for.

    ValueError where names, sizes or types are not those that config.json means, and for a tied head of its own.
    """

    def __init__(self, folder: Path, family: Family, shape: ModelShape, stack: ExitStack) -> None:
        self._family, self._shape = family, shape
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in _files(folder)]
        held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        bare = not any(name.startswith(f"{family.base}.") for name in held)  # saved without its head
        prefix = f"{family.base}." if bare else ""
        # by the names of the whole model
        self._held = {prefix * (name != HEAD) + name: (file, name) for name, file in held.items()}
        wanted = _meta(family, shape)
        for name, (_, _, part) in wanted.items():
            require(name in self._held, "tensor", name, f"is missing in {folder}")
            file, own = self._held[name]
            has, kind = file.get_slice(own).get_shape(), file.get_slice(own).get_dtype()
            size = list(part.shape)
            require(has == size, "tensor", name, f"has the shape {has}, config.json means {size}")
            require(kind in ("F32", "BF16", "F16"), "tensor", name, f"is {kind}, not F32, BF16, F16")
        others = {name for name in self._held.keys() - wanted if not re.fullmatch(family.others, name)}
        if shape.tied_embeddings and HEAD in others:
            (word,) = family.their_names("embedding.word_embeddings.weight")
            same = torch.equal(self._read(HEAD), self._read(word))
            require(same, HEAD, "another matrix", "must be the word embedding, for the model's embeddings are tied")
            others.remove(HEAD)
        rule = f"{family.model} of config.json has none of this name"
        require(not others, "tensor", min(others, default=""), rule)

    def read(self, name: str) -> torch.Tensor:
        """The canonical parameter `name` in fp32."""
        parts = [self._read(part).float() for part in self._family.their_names(name)]
        require(all(part.isfinite().all() for part in parts), "tensor", name, "has values that are not finite")
        return ours(self._family, name, parts, self._shape)

    def _read(self, name: str) -> torch.Tensor:
        file, own = self._held[name]
        return file.get_tensor(own)


def _files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those of the index, or the only one."""
    index, names = folder / INDEX, {"": "model.safetensors"}
    if index.exists():
        names = read_object(index, "folder", weight_map=dict)["weight_map"]
    found = sorted({str(name) for name in names.values()})
    for name in found:
        require(re.fullmatch(r"\w[\w.-]*", name) is not None, "folder", short(name), "must be a file of the folder")
        require((folder / name).is_file(), "folder", folder / name, "no such file")
    return [folder / name for name in found]


def _write(temporary: Path, tensors: Tensors, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Write the file of an untrained checkpoint; its part of the manifest. Rows beyond a tensor's own are zeros."""
    name, found, kinds = "rank_00000.safetensors", {}, checkpoints.KINDS
    file = SliceFile(temporary / name, [(f"{n}/{kind}", size) for n, size in sizes.items() for kind in kinds])
    for parameter, size in sizes.items():
        at = {kind: file.at[f"{parameter}/{kind}"] for kind in kinds}
        found[parameter] = {"shape": size, "slices": [{"box": [(0, n) for n in size], "file": name, "at": at}]}
        padded, tensor = torch.zeros(size), tensors.read(parameter)
        padded[: len(tensor)] = tensor
        for values in (padded, *(torch.zeros(size) for _ in kinds[1:])):
            file.add(values)
    files = {name: file.close()}
    require(not file.error, "out", temporary.parent, file.error)
    progress = {"iteration": 0, "consumed_samples": 0, "scalars": {"step": 0.0}, "layout": None}
    return {**progress, "files": files, "tensors": found}


def main(argv: list[str]) -> int:
    """`export` or `import`, SOURCE, OUT, sequence and vocabulary (0: its own); 2 with one line where it fails."""
    direction, source, out, *sizes = argv
    seq_length, vocab_size = map(int, sizes)
    try:
        if direction == "import":
            print(import_folder(Path(source), Path(out), seq_length, vocab_size))
        else:
            found = checkpoints.found_in(Path(source))
            require(bool(found), "checkpoint", source, "holds no complete checkpoint")
            export(found[-1], Path(out), vocab_size)
            print(out)
    except ValueError as error:
        print("trilane:", one_line(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
