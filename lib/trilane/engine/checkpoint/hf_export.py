"""Convert a checkpoint to a folder of Hugging Face's transformers, and back: GPT-2, BLOOM, Llama and their like.

`trilane convert huggingface CHECKPOINT OUT` writes the weights (fp32, one tensor at a time in memory) and a config.json
for `from_pretrained(OUT)`. `... --back FOLDER OUT` makes of such a folder a checkpoint of iteration 0 with zero Adam
moments, for `run.load`. The families: hf_names.py.
"""

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trilane.config.hf_families import FAMILIES, HEAD, Family, family_of
from trilane.config.model import ModelShape
from trilane.config.shapes import rotary_departures, shape_of_config
from trilane.engine.checkpoint.hf_names import ours, theirs
from trilane.engine.checkpoint.slices import SliceFile, assemble
from trilane.engine.model.parameters import Box, whole_sizes
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line, short
from trilane.utils.validation import from_mapping, read_json, require, require_known, to_mapping
from trilane.workspace import checkpoints

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")  # one for each token
DTYPES = ("F32", "BF16", "F16")
MOST_BYTES = 10**10  # of an exported file


def export(checkpoint: Path, out: Path, vocab_size: int = 0) -> None:
    """Write the checkpoint's weights and sizes to the new folder `out`; ValueError where it cannot be exported.

    `vocab_size` above 0 leaves out the rows of the embedding behind so many, which padding added.
    """
    manifest = _intact_manifest(checkpoint)
    trained = from_mapping(ModelShape, manifest.get("identity", {}).get("shape"), "shape")
    family, tensors = family_of(trained), manifest.get("tensors", {})
    held, sizes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}, whole_sizes(trained)
    wrong = min((name for name in held | sizes if held.get(name) != sizes.get(name)), default="")
    has, means = held.get(wrong, "no such tensor"), sizes.get(wrong, "none")
    require(not wrong, "tensor", wrong, f"{checkpoint.name} has {has}, its model {means}")
    rule = f"the checkpoint has {trained.vocab_size} rows"
    require(vocab_size <= trained.vocab_size, "vocab_size", vocab_size, rule)
    shape = dataclasses.replace(trained, vocab_size=vocab_size or trained.vocab_size)
    boxes = {name: _box(name, tensor["shape"], shape) for name, tensor in tensors.items()}
    require(not out.exists(), "out", out, "exists")
    out.mkdir(parents=True)
    places: dict[str, str] = {}
    files = _files_of(boxes)
    for path, names in files.items():
        entries: dict[str, tuple[int, ...]] = {}
        for name in names:
            parts = theirs(family, name, torch.empty([end for _, end in boxes[name]], device="meta"), shape)
            entries |= {n: tuple(part.shape) for n, part in zip(family.their_names(name), parts, strict=True)}
        places |= dict.fromkeys(entries, path)
        file = SliceFile(out / path, entries.items())
        for name in names:
            whole = assemble(checkpoint, tensors[name]["slices"], "weight", boxes[name])
            for part in theirs(family, name, whole, shape):
                file.add(part)
        file.close()
        require(not file.error, "out", out, file.error)
    if len(files) > 1:
        replace_text(out / INDEX, json.dumps({"metadata": {"total_size": 4 * shape.parameters}, "weight_map": places}))
    replace_text(out / CONFIG, json.dumps(family.config(shape), indent=2) + "\n")


def _files_of(boxes: Mapping[str, Box]) -> dict[str, list[str]]:
    """File -> the canonical tensors in it: at most MOST_BYTES, or one tensor that is larger."""
    lists: list[list[str]] = [[]]
    left = MOST_BYTES
    for name, box in boxes.items():
        size = 4 * math.prod(end for _, end in box)
        if size > left and lists[-1]:
            lists, left = [*lists, []], MOST_BYTES
        lists[-1].append(name)
        left -= size
    if len(lists) == 1:
        return {WEIGHTS: lists[0]}
    return {f"model-{n:05d}-of-{len(lists):05d}.safetensors": names for n, names in enumerate(lists, 1)}


def _box(name: str, size: Sequence[int], shape: ModelShape) -> Box:
    """The part of a canonical tensor that is exported: all but the rows behind the vocabulary."""
    return tuple((0, shape.vocab_size if name in ROWS and d == 0 else n) for d, n in enumerate(size))


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
    with ExitStack() as stack:
        try:
            tensors = Tensors(folder, family, own, stack)
            temporary = out / f".{target.name}.import"
            temporary.mkdir(parents=True)
            try:
                written = _write(temporary, tensors, whole_sizes(shape))
            except BaseException:
                shutil.rmtree(temporary)
                raise
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"folder={folder}: its tensors cannot be read ({short(str(error))})") from None
    checkpoints.write_manifest(temporary, {**written, "identity": {"shape": to_mapping(shape)}})
    checkpoints.publish(temporary, target)
    return target


def read_config(folder: Path, seq_length: int = 0) -> tuple[Family, ModelShape]:
    """The family and shape of the folder's config.json; ValueError for what our model does not compute."""
    given = read_json(folder / CONFIG, "folder")
    require(isinstance(given, dict), "folder", folder / CONFIG, "must be a JSON object")
    require_known("model_type", str(given.get("model_type")), FAMILIES)
    family, shape = FAMILIES[given["model_type"]], shape_of_config(given, seq_length).shape
    if misfit := family.misfit(shape):
        require(False, *misfit)
    for key, value in family.settings.items():
        require(given.get(key, value) == value, key, given.get(key), f"a model here has {value}")
    require(not given.get("quantization_config"), "quantization_config", "given", "weights are not quantized here")
    for departure in rotary_departures(given):
        require(False, *departure)
    return family, shape


class Tensors:
    """The tensors of a folder's safetensors files by canonical name; none is read before it is asked for.

    ValueError where names, sizes or types are not those that config.json means, and for a tied head of its own.
    """

    def __init__(self, folder: Path, family: Family, shape: ModelShape, stack: ExitStack) -> None:
        self._family, self._shape = family, shape
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in _files(folder)]
        self._held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        bare = not any(name.startswith(f"{family.base}.") for name in self._held)  # saved without its head
        self._prefix = f"{family.base}." if bare else ""
        wanted: dict[str, list[int]] = {}
        for name, whole in whole_sizes(shape).items():
            parts = theirs(family, name, torch.empty(whole, device="meta"), shape)
            wanted.update(zip(family.their_names(name), (list(part.shape) for part in parts), strict=True))
        for name, size in wanted.items():
            require(self._own(name) in self._held, "tensor", name, f"is missing in {folder}")
            part = self._slice(name)
            has = part.get_shape()
            require(has == size, "tensor", name, f"has the shape {has}, {CONFIG} means {size}")
            require(part.get_dtype() in DTYPES, "tensor", name, f"is {part.get_dtype()}, not {', '.join(DTYPES)}")
        full = {self._prefix * (name != HEAD) + name for name in self._held}
        others = [name for name in full - set(wanted) if not re.fullmatch(family.others, name)]
        self._check_tied(others)
        require(not others, "tensor", min(others, default=""), f"{family.model} of {CONFIG} has none of this name")

    def _check_tied(self, others: list[str]) -> None:
        """Leave out of `others` the tied head, if it is the embedding indeed."""
        if self._shape.tied_embeddings and HEAD in others:
            word = self._family.their_names(ROWS[0])[0]
            same = torch.equal(self._read(HEAD), self._read(word))
            require(same, HEAD, "another matrix", "must be the word embedding, for the model's embeddings are tied")
            others.remove(HEAD)

    def read(self, name: str) -> torch.Tensor:
        """The canonical parameter `name` in fp32."""
        parts = [self._read(part).float() for part in self._family.their_names(name)]
        require(all(part.isfinite().all() for part in parts), "tensor", name, "has values that are not finite")
        return ours(self._family, name, parts, self._shape)

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix) if self._prefix else name

    def _slice(self, name: str) -> Any:
        return self._held[self._own(name)].get_slice(self._own(name))

    def _read(self, name: str) -> torch.Tensor:
        return self._held[self._own(name)].get_tensor(self._own(name))


def _files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those of the index, or the only one."""
    index = folder / INDEX
    listed = read_json(index, "folder") if index.exists() else {"weight_map": {"": WEIGHTS}}
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    require(isinstance(names, dict), "folder", index, "must list the file of each tensor")
    assert isinstance(names, dict)
    found = sorted({str(name) for name in names.values()})
    for name in found:
        require(checkpoints.FILE.fullmatch(name) is not None, "folder", short(name), "must be a file of the folder")
        require((folder / name).is_file(), "folder", folder / name, "no such file")
    return [folder / name for name in found]


def _write(temporary: Path, tensors: Tensors, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Write the file of an untrained checkpoint; its part of the manifest. Rows beyond a tensor's own are zeros."""
    name = "rank_00000.safetensors"
    entries = [(f"{n}/{kind}", size) for n, size in sizes.items() for kind in checkpoints.KINDS]
    file = SliceFile(temporary / name, entries)
    found = {}
    for parameter, size in sizes.items():
        at = {kind: file.at[f"{parameter}/{kind}"] for kind in checkpoints.KINDS}
        whole = {"box": [(0, n) for n in size], "file": name, "at": at}
        found[parameter] = {"shape": list(size), "slices": [whole]}
        tensor = tensors.read(parameter)
        file.add(tensor)
        if len(tensor) < size[0]:
            file.add(torch.zeros(size[0] - len(tensor), *size[1:]))
        for _ in checkpoints.KINDS[1:]:
            file.add(torch.zeros(size))
    files = {name: file.close()}
    require(not file.error, "out", temporary.parent, file.error)
    progress = {"iteration": 0, "consumed_samples": 0, "scalars": {"step": 0.0}, "layout": None}
    return {**progress, "files": files, "tensors": found}


def _intact_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint with intact files; ValueError otherwise."""
    manifest = checkpoints.read_manifest(checkpoint)
    for name, (size, checksum) in manifest.get("files", {}).items():
        problem = checkpoints.fault(checkpoint, name, size, checksum)
        require(problem is None, "checkpoint", checkpoint, str(problem))
    return manifest


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
