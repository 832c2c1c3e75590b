"""Our tensors and those of transformers' models are one model under two sets of names."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SHAPE

from trilane.config.model import ModelShape

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

BLOOM = replace(SHAPE, positions="alibi", embedding_layernorm=True, activation="gelu-tanh", norm_epsilon=1e-3)
LLAMA = replace(SHAPE, positions="rotary", normalization="rmsnorm", activation="swiglu", biases="none")
LLAMA = replace(LLAMA, num_key_value_heads=2, ffn_hidden_size=160, tied_embeddings=False, norm_epsilon=1e-3)
SHAPES = {
    "gpt2 as published": replace(SHAPE, activation="gelu-tanh", ffn_hidden_size=96, tied_embeddings=False),
    "bloom, 6 heads": replace(BLOOM, hidden_size=96, num_attention_heads=6, tied_embeddings=False),
    "llama": LLAMA,
    "qwen2": replace(LLAMA, biases="qkv", num_key_value_heads=1, rotary_base=500),
}


def canonical(shape: ModelShape) -> dict:
    """Random tensors in which every entry matters, norms and biases too."""
    import torch

    from trilane.engine.model.parameters import whole_sizes

    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(size, generator=generator) * 0.1 for name, size in whole_sizes(shape).items()}
    return {name: 1 + tensor if "layernorm.weight" in name else tensor for name, tensor in drawn.items()}


def checkpoint(shape: ModelShape, folder: Path) -> dict:
    """A checkpoint of random tensors in `folder`, and these."""
    from trilane.engine.checkpoint.huggingface import _write
    from trilane.utils.validation import to_mapping
    from trilane.workspace.checkpoints import write_manifest

    class Ours(dict):
        read = dict.get

    ours = canonical(shape)
    folder.mkdir()
    written = _write(folder, Ours(ours), {name: tuple(tensor.shape) for name, tensor in ours.items()})
    write_manifest(folder, {**written, "identity": {"shape": to_mapping(shape)}})
    return ours


def weights(folder: Path) -> dict:
    from trilane.engine.checkpoint.slices import assemble
    from trilane.workspace.checkpoints import read_manifest

    tensors = read_manifest(folder)["tensors"].items()
    return {n: assemble(folder, t["slices"], "weight", tuple((0, size) for size in t["shape"])) for n, t in tensors}


def logits(folder: Path, tokens: object) -> object:
    """Those of transformers; every tensor of the folder has its place in the model, and none is missing."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_exported_model_has_our_logits_and_comes_back_bit_for_bit(shape: ModelShape, tmp_path: Path) -> None:
    """No head, matrix or pair of rotary channels is turned the wrong way."""
    import torch

    from trilane.engine.checkpoint.huggingface import export, import_folder
    from trilane.engine.reference import logits as reference

    ours = checkpoint(shape, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "model")
    tokens = torch.arange(2 * 48).reshape(2, 48) * 7 % shape.vocab_size
    assert (logits(tmp_path / "model", tokens) - reference(ours, shape, tokens)).abs().max() < 1e-5
    back = weights(import_folder(tmp_path / "model", tmp_path / "back"))
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}
WIDE = {"max_position_embeddings": 64, "intermediate_size": 160, "num_key_value_heads": 2}
THEIRS = {
    "gpt2, bf16, in parts": ("gpt2", {"n_positions": 64}, {"dtype": "bfloat16", "max_shard_size": "60KB"}),
    "bloom without head": ("bloom", {}, {"bare": True}),
    "llama, fp16": (
        "llama",
        {**WIDE, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"dtype": "float16"},
    ),
    "mistral": ("mistral", {**WIDE, "sliding_window": None}, {}),
    "qwen2, tied": ("qwen2", {**WIDE, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize(("kind", "settings", "how"), THEIRS.values(), ids=THEIRS)
def test_a_model_of_transformers_has_the_same_logits_here(kind: str, settings: dict, how: dict, tmp_path: Path) -> None:
    import torch
    import transformers

    from trilane.engine.checkpoint.huggingface import import_folder, read_config
    from trilane.engine.reference import logits as reference

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**SMALL, **settings))
    model.to(getattr(torch, how.get("dtype", "float32")))
    saved = model.base_model if how.get("bare") else model
    saved.save_pretrained(tmp_path / "model", max_shard_size=how.get("max_shard_size", "1GB"))
    found = weights(import_folder(tmp_path / "model", tmp_path / "out", seq_length=64))
    shape = read_config(tmp_path / "model", 64)[1]
    tokens = torch.arange(2 * 48).reshape(2, 48) * 7 % shape.vocab_size
    theirs = model.float().eval()(tokens).logits
    assert (theirs - reference(found, shape, tokens)).abs().max() < 1e-5


def saved(folder: Path, kind: str, config: dict, change: Callable[[dict], object] = lambda state: None) -> Path:
    """A random model of transformers in `folder`; `config` changes its config.json only, `change` its tensors."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    wide = WIDE if kind == "llama" else {"n_positions": 64}
    transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[kind](**SMALL, **wide, tie_word_embeddings=True)
    ).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


NORM = "model.norm.weight"
BAD = [
    ("llama", {"model_type": "opt"}, {}, "model_type=opt: "),
    ("gpt2", {"scale_attn_weights": False}, {}, "scale_attn_weights=False: a model here has True"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, {}, "rope_type=yarn: "),
    ("llama", {"hidden_act": "gelu"}, {}, "activation=geglu: LlamaForCausalLM has swiglu"),
    ("llama", {"num_hidden_layers": 3}, {}, "tensor=model.layers.2.input_layernorm.weight: is missing"),
    ("llama", {"num_hidden_layers": 1}, {}, "tensor=model.layers.1.input_layernorm.weight: "),
    ("llama", {"num_key_value_heads": 4}, {}, "has the shape [32, 64], config.json means [64, 64]"),
    ("llama", {}, {NORM: "float64"}, f"tensor={NORM}: is F64, not F32, BF16, F16"),
    ("llama", {}, {"lm_head.weight": ""}, "lm_head.weight=another matrix: "),
    ("llama", {}, {NORM: "nan"}, "tensor=decoder.final_layernorm.weight: has values that are not finite"),
    ("llama", {"quantization_config": {"bits": 4}}, {}, "quantization_config=given: "),
]


@pytest.mark.parametrize(("kind", "config", "change", "message"), BAD, ids=str)
def test_a_folder_that_is_no_model_of_ours_is_one_line(
    kind: str, config: dict, change: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    import torch

    from trilane.engine.checkpoint.huggingface import main

    def changed(state: dict) -> None:
        for name, dtype in change.items():
            kept = torch.full_like(state[NORM], math.nan) if dtype == "nan" else None
            other = state[name].to(getattr(torch, dtype)) if dtype and kept is None else torch.zeros(384, 64)
            state[name] = other if kept is None else kept

    folder = saved(tmp_path / "model", kind, config, changed)
    capsys.readouterr()
    assert main(["import", str(folder), str(tmp_path / "out"), "0", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


def test_a_cut_file_of_tensors_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from trilane.engine.checkpoint.huggingface import main

    path = saved(tmp_path / "model", "gpt2", {}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "out"), "0", "0"]) == 2
    assert "its tensors cannot be read" in capsys.readouterr().err


def test_padding_is_rows_of_zeros_which_an_export_leaves_out(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from trilane.engine.checkpoint import huggingface as hf_export

    folder = saved(tmp_path / "model", "llama", {})
    back = hf_export.import_folder(folder, tmp_path / "out", vocab_size=512)
    assert not weights(back)["embedding.word_embeddings.weight"][384:].any()
    hf_export.export(back, tmp_path / "again", vocab_size=384, most_bytes=150_000)  # in several files
    before, parts = load_file(folder / "model.safetensors"), sorted((tmp_path / "again").glob("*.safetensors"))
    after = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    tokens = torch.arange(48)[None]
    assert len(parts) > 2 and (logits(folder, tokens) == logits(tmp_path / "again", tokens)).all()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
