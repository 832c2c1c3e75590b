"""Our tensors and those of transformers' models are one model under two sets of names."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SHAPE

from trilane.config.model import ModelShape
from trilane.workspace.checkpoints import KINDS, name_of, read_manifest, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

BLOOM = replace(
    SHAPE, positions="alibi", embedding_layernorm=True, activation="gelu-tanh", norm_epsilon=1e-3
)
LLAMA = replace(
    SHAPE, positions="rotary", normalization="rmsnorm", activation="swiglu", biases="none"
)
LLAMA = replace(
    LLAMA, num_key_value_heads=2, ffn_hidden_size=160, tied_embeddings=False, norm_epsilon=1e-3
)
SHAPES = {
    "gpt2 as published": replace(
        SHAPE, activation="gelu-tanh", ffn_hidden_size=96, tied_embeddings=False
    ),
    "bloom, 6 heads": replace(BLOOM, hidden_size=96, num_attention_heads=6, tied_embeddings=False),
    "qwen3": replace(LLAMA, kv_channels=24, qk_layernorm=True),
    "mixtral": replace(LLAMA, experts=4, top_k=2, expert_ffn=96),
    "qwen3 experts": replace(
        LLAMA, qk_layernorm=True, experts=8, top_k=3, expert_ffn=48, router_pre_softmax=True
    ),
    "smollm3": replace(LLAMA, no_rope_freq=4),
    "qwen2": replace(LLAMA, biases="qkv", num_key_value_heads=1, rotary_base=500),
}


def checkpoint(shape: ModelShape, folder: Path) -> dict:
    """A checkpoint of random tensors in `folder`, in which every entry matters, norms and biases
    too; and these.
    """
    import torch

    from trilane.utils.validation import to_mapping
    from trilane_engine.checkpoint.slices import write_slices
    from trilane_engine.model.parameters import whole_sizes

    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(size, generator=generator) * 0.1
        for name, size in whole_sizes(shape).items()
    }
    ours = {
        name: 1 + tensor if "layernorm.weight" in name else tensor for name, tensor in drawn.items()
    }
    folder.mkdir()
    name, tensors = "rank_00000.safetensors", {}
    at, file = write_slices(
        folder / name, [(key, tuple(tensor.shape)) for key, tensor in ours.items()], ours.values()
    )
    for key, tensor in ours.items():
        box = [(0, size) for size in tensor.shape]
        slices = [{"box": box, "file": name, "at": dict.fromkeys(KINDS, at[key])}]
        tensors[key] = {"shape": tensor.shape, "slices": slices}
    progress = {"iteration": 5, "consumed_samples": 0, "scalars": {"step": 5.0}, "layout": None}
    manifest = {**progress, "files": {name: file}, "tensors": tensors}
    write_manifest(folder, {**manifest, "identity": {"shape": to_mapping(shape)}})
    return ours


def logits(folder: Path, tokens: object) -> object:
    """Those of transformers; every tensor of the folder has its place in the model, and none is
    missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(
        found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), found
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_exported_model_has_our_logits(shape: ModelShape, tmp_path):
    """No head, matrix or pair of rotary channels is turned the wrong way; in one file
    or several.
    """
    import torch
    from reference import logits as reference

    from trilane_engine.checkpoint.huggingface import export

    ours = checkpoint(shape, tmp_path / "checkpoint")
    export(
        tmp_path / "checkpoint",
        tmp_path / "model",
        most_bytes=150_000 if shape.biases == "qkv" else 10**10,
    )
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 2) == (shape.biases == "qkv")
    tokens = torch.arange(2 * 48).reshape(2, 48) * 7 % shape.vocab_size
    assert (logits(tmp_path / "model", tokens) - reference(ours, shape, tokens)).abs().max() < 1e-5


def test_the_tokenizer_of_a_folder_is_that_of_the_training(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    from trilane_engine.checkpoint.huggingface import export
    from trilane_engine.data.corpus import tokenizer

    coder = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    coder.pre_tokenizer = pre_tokenizers.Whitespace()
    coder.add_special_tokens(["</s>"])
    (tmp_path / "words").mkdir()
    coder.save(f"{tmp_path}/words/tokenizer.json")
    checkpoint(LLAMA, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "model", f"{tmp_path}/words")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = tokenizer(f"{tmp_path}/words").encode("b a").tolist()
    assert [*theirs("b a")["input_ids"], theirs.eos_token_id] == ours


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    from trilane_engine.checkpoint.huggingface import main

    run = tmp_path / name_of(5)
    checkpoint(LLAMA, run)
    for name in ("broken", "own"):
        shutil.copytree(run, tmp_path / name / run.name)
    next((tmp_path / "broken").rglob("rank_*.safetensors")).write_bytes(b"")
    manifest = read_manifest(run)
    identity = {**manifest["identity"], "layer": "mine.py:Own (12)"}
    write_manifest(tmp_path / "own" / run.name, {**manifest, "identity": identity})
    for source, out, rule in [
        ("own", "new", "layer=mine.py:Own (12): transformers has no class"),
        (run.name, "broken", f"out={tmp_path / 'broken'}: exists"),
        ("broken", "new", "rank_00000.safetensors"),
    ]:
        assert main([str(tmp_path / source), str(tmp_path / out), ""]) == 2
        error = capsys.readouterr().err
        assert rule in error and error.count("\n") == 1, error
