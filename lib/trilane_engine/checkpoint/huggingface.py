"""A checkpoint as a folder of Hugging Face's transformers: GPT-2, BLOOM, Llama, Mixtral and their
like.

`trilane convert huggingface CHECKPOINT OUT` writes the weights (fp32, one file at a time in
memory), a config.json, and the tokenizer of the training's data for `from_pretrained(OUT)`. The
families: config/shapes.py.

Canonical: a matrix is (out, in); the rows of `linear_qkv` go by group of heads that share keys and
values: (group, its queries ... | key | value, channel); a gated `linear_fc1` is (gate | up,
channel, in). Where a family keeps such parts apart, its table has a name for each; where it joins
them, kind after kind. Rotary positions turn channels i and i + D/2 of a head, in megatron-core and
in transformers alike, so that no channel moves. The conversions are permutations, valid for an
optimizer's moments as well as for weights.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trilane.config.layer import STANDARD
from trilane.config.model import ModelShape
from trilane.config.shapes import Family, family_of
from trilane.utils.files import replace_text
from trilane.utils.validation import from_mapping, print_refusal, require, require_new
from trilane.workspace import checkpoints
from trilane_engine.checkpoint.slices import assemble
from trilane_engine.data.corpus import tokenizer as read_tokenizer
from trilane_engine.model.parameters import whole_sizes

INDEX = "model.safetensors.index.json"


def theirs(family: Family, name: str, tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The tensors of their_names() of the canonical parameter `name`; they share memory where
    nothing moves.
    """
    parts = [tensor]
    if "linear_qkv." in name and not family.by_group:
        rows = tensor.unflatten(0, (shape.kv_heads, -1, shape.head_dim))
        parts = [part.flatten(0, 2) for part in rows.split([rows.shape[1] - 2, 1, 1], 1)]
    elif "linear_fc1." in name and shape.is_gated:
        parts = list(tensor)
    if len(family.their_names(name)) < len(parts):
        parts = [torch.cat(parts)]
    return [part.t().contiguous() if is_turned(family, name) else part for part in parts]


def ours(family: Family, name: str, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """The inverse of theirs()."""
    parts = [part.t().contiguous() if is_turned(family, name) else part for part in tensors]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if "linear_qkv." in name and not family.by_group:
        keys = shape.kv_heads * shape.head_dim
        kinds = whole.split([shape.query_channels, keys, keys])
        rows = [kind.unflatten(0, (shape.kv_heads, -1, shape.head_dim)) for kind in kinds]
        return torch.cat(rows, 1).flatten(0, 2)
    if "linear_fc1." in name and shape.is_gated:
        return whole.unflatten(0, (2, -1))
    return whole


def is_turned(family: Family, name: str) -> bool:
    """Whether their tensor of `name` is (in, out)."""
    return family.transposed and ".linear_" in name and name.endswith(".weight")


def _meta(family: Family, shape: ModelShape) -> dict[str, tuple[str, int, Tensor]]:
    """Their name of each tensor -> our name, the place among its parts, and the tensor without
    memory.
    """
    places = {}
    for name, size in whole_sizes(shape).items():
        parts = theirs(family, name, torch.empty(size, device="meta"), shape)
        for place, (own, part) in enumerate(zip(family.their_names(name), parts, strict=True)):
            places[own] = (name, place, part)
    return places


def export(checkpoint: Path, out: Path, tokenizer: str = "", most_bytes: int = 10**10) -> None:
    """Write the checkpoint's weights, sizes and tokenizer to the new folder `out`; ValueError where
    that cannot be.

    A file has at most `most_bytes`, or one tensor that is larger. `tokenizer` is a folder with
    tokenizer.json, where it is not the training's; none is written where that is bytes.
    """
    manifest, shape = verified(checkpoint)
    family = family_of(shape)
    tensors = manifest["tensors"]
    name = tokenizer or manifest["identity"].get("data", {}).get("tokenizer", "bytes")
    coder = None if name == "bytes" else read_tokenizer(name)
    if coder:
        rule = f"the tokenizer has {coder.vocab_size} ids"
        require(coder.vocab_size <= shape.vocab_size, "vocab_size", shape.vocab_size, rule)
    require_new("out", out)
    meta = _meta(family, shape)
    whole = whole_sizes(shape)
    split = split_torch_state_dict_into_shards(
        {own: part for own, (_, _, part) in meta.items()},
        max_shard_size=most_bytes,
        filename_pattern="model{suffix}.safetensors",
    )
    out.mkdir(parents=True)
    for file, names in split.filename_to_tensors.items():
        weights: dict[str, list[Tensor]] = {}
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
        facts = {"total_size": 4 * shape.parameters}
        index = {"metadata": facts, "weight_map": split.tensor_to_filename}
        replace_text(out / INDEX, json.dumps(index))
    config = family.config(shape)
    if coder:
        from transformers import PreTrainedTokenizerFast

        fast = PreTrainedTokenizerFast(
            tokenizer_object=coder.coder,
            model_max_length=shape.seq_length,
            model_input_names=["input_ids", "attention_mask"],
            bos_token=coder.end,
            eos_token=coder.end,
        )
        fast.save_pretrained(out)
        # in the training's data each document follows the end of another: it is also what begins a
        # text
        config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), coder.eod)
    replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def verified(checkpoint: Path) -> tuple[dict[str, Any], ModelShape]:
    """The manifest of our checkpoint and its shape; ValueError where a file is damaged or a tensor
    is not its model's.

    An own layer is refused: no other program has a class for it.
    """
    manifest = checkpoints.read_manifest(checkpoint)
    for name, (_, checksum) in manifest.get("files", {}).items():
        problem = checkpoints.fault(checkpoint, name, checksum)
        require(problem is None, "checkpoint", checkpoint, str(problem))
    identity = manifest.get("identity", {})
    layer = identity.get("layer", STANDARD)
    rule = "transformers has no class for a layer of your own, nor has Megatron-LM"
    require(layer == STANDARD, "layer", layer, rule)
    trained = from_mapping(ModelShape, identity.get("shape"), "shape")
    sizes = whole_sizes(trained)
    held = {name: tuple(tensor["shape"]) for name, tensor in manifest.get("tensors", {}).items()}
    for name in sorted(held | sizes):
        has = held.get(name, "no such tensor")
        means = sizes.get(name, "none")
        require(has == means, "tensor", name, f"{checkpoint.name} has {has}, its model {means}")
    return manifest, trained


def main(argv: list[str]) -> int:
    """SOURCE, OUT and tokenizer ("": its own); 2 with one line where it fails."""
    source, out, tokenizer = argv
    try:
        complete = checkpoints.found_in(Path(source))
        require(bool(complete), "checkpoint", source, "holds no complete checkpoint")
        export(complete[-1], Path(out), tokenizer)
        print(out)
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
