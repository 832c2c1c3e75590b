"""Convert a checkpoint to a Hugging Face GPT-2 folder, and back.

`trilane convert huggingface CHECKPOINT OUT` writes the weights (fp32, one tensor at a time in memory) and a config.json
for `GPT2LMHeadModel.from_pretrained(OUT)`. `... --back FOLDER OUT` makes of such a folder a checkpoint of iteration 0
with zero Adam moments, for `run.load`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trilane.config.model import ModelShape
from trilane.engine.checkpoint.gpt2_names import canonical_state, gpt2_name, gpt2_tensor
from trilane.engine.checkpoint.slices import SliceFile, assemble
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line, short
from trilane.utils.validation import from_mapping, read_json, require, to_mapping
from trilane.workspace import checkpoints

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# GPT2Config's names for the sizes of a shape.
SIZES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "seq_length": "n_positions",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}


# Fixed in our GPT; transformers' default is the tanh form of GELU, another function.
FIXED = {"model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-5}


def export(checkpoint: Path, out: Path) -> None:
    """Write the checkpoint's weights and sizes to the new folder `out`; ValueError where it cannot be exported."""
    manifest = _intact_manifest(checkpoint)
    shape = from_mapping(ModelShape, manifest["identity"]["shape"], "shape")
    tensors, heads = manifest["tensors"], shape.num_attention_heads
    entries = []
    for name, tensor in tensors.items():
        exported = gpt2_tensor(name, torch.empty(tensor["shape"], device="meta"), heads)
        entries.append((gpt2_name(name), tuple(exported.shape)))
    require(not out.exists(), "out", out, "exists")
    out.mkdir(parents=True)
    file = SliceFile(out / WEIGHTS, entries)
    for name, tensor in tensors.items():
        box = tuple((0, n) for n in tensor["shape"])
        file.add(gpt2_tensor(name, assemble(checkpoint, tensor["slices"], "weight", box), heads))
    file.close()
    require(not file.error, "out", out, file.error)
    replace_text(out / CONFIG, json.dumps(config(shape), indent=2) + "\n")


def config(shape: ModelShape) -> dict[str, Any]:
    """GPT2Config's JSON, without dropout, which only training uses."""
    sizes = {theirs: getattr(shape, ours) for ours, theirs in SIZES.items()}
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    return {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32", **FIXED, **sizes, **dropout}


def import_gpt2(folder: Path, out: Path) -> Path:
    """Write a checkpoint of iteration 0 below `out` from a GPT-2 folder; its path. ValueError for any other model."""
    given = read_json(folder / CONFIG, "GPT-2")
    require(isinstance(given, dict), "GPT-2", folder / CONFIG, "must be a JSON object")
    for name, value in FIXED.items():
        require(given.get(name, value) == value, name, given.get(name), f"our GPT has {value}")
    missing = [theirs for ours, theirs in SIZES.items() if theirs not in given and ours != "tied_embeddings"]
    require(not missing, CONFIG, folder / CONFIG, f"has no {', '.join(missing)}")
    sizes = {ours: given[theirs] for ours, theirs in SIZES.items() if theirs in given}
    shape = from_mapping(ModelShape, sizes, "shape")
    try:
        state = canonical_state(dict(_tensors(folder)), shape.num_attention_heads, shape.tied_embeddings)
    except (SafetensorError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(f"GPT-2={folder}: its tensors cannot be read ({short(str(error))})") from None
    count = sum(tensor.numel() for tensor in state.values())
    require(count == shape.parameters, "GPT-2", folder, f"has {count} parameters, {CONFIG} means {shape.parameters}")
    target = out / checkpoints.name_of(0)
    require(not target.exists(), "out", target, "exists")
    temporary = out / f".{target.name}.import"
    temporary.mkdir(parents=True)
    checkpoints.write_manifest(temporary, {**_write(temporary, state), "identity": {"shape": to_mapping(shape)}})
    checkpoints.publish(temporary, target)
    return target


def _write(temporary: Path, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write the file of an untrained checkpoint; its part of the manifest."""
    name = "rank_00000.safetensors"
    entries = [(f"{n}/{kind}", tuple(t.shape)) for n, t in state.items() for kind in checkpoints.KINDS]
    file = SliceFile(temporary / name, entries)
    tensors = {}
    for parameter, tensor in state.items():
        at = {kind: file.at[f"{parameter}/{kind}"] for kind in checkpoints.KINDS}
        whole = {"box": [(0, n) for n in tensor.shape], "file": name, "at": at}
        tensors[parameter] = {"shape": list(tensor.shape), "slices": [whole]}
        for kind in checkpoints.KINDS:
            file.add(tensor if kind == "weight" else torch.zeros_like(tensor, dtype=torch.float32))
    files = {name: file.close()}
    require(not file.error, "out", temporary.parent, file.error)
    progress = {"iteration": 0, "consumed_samples": 0, "scalars": {"step": 0.0}, "layout": None}
    return {**progress, "files": files, "tensors": tensors}


def _intact_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint with intact files; ValueError otherwise."""
    manifest = checkpoints.read_manifest(checkpoint)
    for name, (size, checksum) in manifest["files"].items():
        problem = checkpoints.fault(checkpoint, name, size, checksum)
        require(problem is None, "checkpoint", checkpoint, str(problem))
    return manifest


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's safetensors files."""
    index = folder / INDEX
    listed = read_json(index, "GPT-2") if index.exists() else {"weight_map": {"": WEIGHTS}}
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    require(isinstance(names, dict), "GPT-2", index, "must list the file of each tensor")
    assert isinstance(names, dict)
    for name in sorted({str(name) for name in names.values()}):
        require(checkpoints.FILE.fullmatch(name) is not None, "GPT-2", short(name), "must be a file of the folder")
        require((folder / name).is_file(), "GPT-2", folder / name, "no such file")
        with safe_open(folder / name, framework="pt") as file:
            names_inside = file.keys()
            yield from ((key, file.get_tensor(key)) for key in names_inside)


def main(argv: list[str]) -> int:
    """Arguments `[--back] SOURCE OUT`, from `trilane convert huggingface`; 2 with one line where it fails."""
    *options, source, out = argv
    try:
        if options:
            print(import_gpt2(Path(source), Path(out)))
        else:
            found = checkpoints.found_in(Path(source))
            require(bool(found), "checkpoint", source, "holds no complete checkpoint")
            export(found[-1], Path(out))
            print(out)
    except ValueError as error:
        print("trilane:", one_line(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
