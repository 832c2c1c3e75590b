"""Our tensors and those of transformers' models are one model under two sets of names."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SHAPE, changed, run_folder, small_plan, steps

from trilane.config.model import ModelShape
from trilane.engine.parity import LLAMA_SHAPE
from trilane.workspace.checkpoints import name_of, read_manifest, write_manifest

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


def checkpoint(shape: ModelShape, folder: Path) -> dict:
    """A checkpoint of random tensors in `folder`, in which every entry matters, norms and biases too; and these."""
    import torch

    from trilane.engine.checkpoint.huggingface import _write
    from trilane.engine.model.parameters import whole_sizes
    from trilane.utils.validation import to_mapping

    class Ours(dict):
        read = dict.get

    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(size, generator=generator) * 0.1 for name, size in whole_sizes(shape).items()}
    ours = {name: 1 + tensor if "layernorm.weight" in name else tensor for name, tensor in drawn.items()}
    folder.mkdir()
    written = _write(folder, Ours(ours), {name: tuple(tensor.shape) for name, tensor in ours.items()})
    write_manifest(folder, {**written, "identity": {"shape": to_mapping(shape)}})
    return ours


def weights(folder: Path) -> dict:
    from trilane.engine.checkpoint.slices import assemble

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
    """No head, matrix or pair of rotary channels is turned the wrong way; in one file or several."""
    import torch

    from trilane.engine.checkpoint.huggingface import export, import_folder
    from trilane.engine.reference import logits as reference

    ours = checkpoint(shape, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "model", most_bytes=150_000 if shape is LLAMA else 10**10)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 2) == (shape is LLAMA)
    tokens = torch.arange(2 * 48).reshape(2, 48) * 7 % shape.vocab_size
    assert (logits(tmp_path / "model", tokens) - reference(ours, shape, tokens)).abs().max() < 1e-5
    back = weights(import_folder(tmp_path / "model", tmp_path / "back"))
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}
WIDE = {"max_position_embeddings": 64, "intermediate_size": 160, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
THEIRS = {
    "gpt2, bf16, in parts": ("gpt2", {"n_positions": 64}, {"dtype": "bfloat16", "max_shard_size": "60KB"}),
    "bloom without head": ("bloom", {}, {"bare": True}),
    "llama, fp16": ("llama", {**WIDE, **ROPE}, {"dtype": "float16"}),
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
    ("llama", {}, {}, "its tensors cannot be read"),
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
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: -100 if "cannot be read" in message else None])
    capsys.readouterr()
    assert main(["import", str(folder), str(tmp_path / "out"), "0", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


def test_padding_is_rows_of_zeros_which_an_export_leaves_out(tmp_path: Path) -> None:
    import torch

    from trilane.engine.checkpoint.huggingface import export, import_folder

    folder = saved(tmp_path / "model", "llama", {})
    back = import_folder(folder, tmp_path / "padded", vocab_size=512)
    assert not weights(back)["embedding.word_embeddings.weight"][384:].any()
    export(back, tmp_path / "again", vocab_size=384)
    tokens = torch.arange(48)[None]
    assert (logits(folder, tokens) == logits(tmp_path / "again", tokens)).all()


SAMPLES = """
import torch
from trilane.engine.data.samples import SampleLoader
batch = list(plan.batches(plan.run.train_iters - 1))[0]
rows = SampleLoader(plan, world, (0, 1)).microbatches(batch)
torch.save([(row.tokens, row.labels) for row in rows], PATH)
"""


@pytest.mark.slow
def test_a_trained_checkpoint_is_a_model_of_transformers_and_a_plan_starts_from_one(
    fork: Callable, ask: Callable, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The loss of the last iteration belongs to the weights of the checkpoint before it, of two stages of two ranks."""
    import torch
    from transformers import LlamaForCausalLM

    from trilane.engine.checkpoint.huggingface import main

    plan = replace(small_plan(data, iters=5, source="mock", tp=2, pp=2), shape=LLAMA_SHAPE)
    folder, model = run_folder(changed(plan, "run", save_interval=4), tmp_path / "run"), tmp_path / "model"
    fork(4, folder)
    before = folder / "checkpoints" / name_of(4)
    assert main(["export", str(before), str(model), "0", "0"]) == 0 and capsys.readouterr().out == f"{model}\n"
    alone = replace(small_plan(data, iters=5, source="mock"), shape=LLAMA_SHAPE)
    ask(alone, f"PATH = {str(tmp_path / 'samples')!r}\n{SAMPLES}")
    tokens, labels = map(torch.cat, zip(*torch.load(tmp_path / "samples"), strict=True))
    with torch.no_grad():
        scores = LlamaForCausalLM.from_pretrained(model).eval()(tokens).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(steps(folder)[-1]["lm_loss"], abs=1e-5)

    assert main(["import", str(model), str(tmp_path / "imported"), "0", "0"]) == 0
    back = weights(tmp_path / "imported/iter_0000000")
    assert all((back[name] == tensor).all() for name, tensor in weights(before).items())
    again = run_folder(changed(alone, "run", load=str(tmp_path / "imported")), tmp_path / "again")
    fork(1, again)
    assert steps(again)[0]["lm_loss"] < steps(folder)[0]["lm_loss"] - 0.5 and len(steps(again)) == 5


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from trilane.engine.checkpoint.huggingface import main

    run = tmp_path / name_of(5)
    checkpoint(LLAMA, run)
    (tmp_path / "broken").mkdir()
    shutil.copytree(run, tmp_path / "broken" / run.name)
    next((tmp_path / "broken" / run.name).glob("rank_*.safetensors")).write_bytes(b"")
    shutil.copytree(run, tmp_path / "lacking" / run.name)
    manifest = read_manifest(run)
    del manifest["tensors"]["decoder.final_layernorm.weight"]
    write_manifest(tmp_path / "lacking" / run.name, manifest)
    for (source, out, rows), rule in [
        ((tmp_path / "nothing", tmp_path / "new", 0), "holds no complete checkpoint"),
        ((run, tmp_path / "broken", 0), f"out={tmp_path / 'broken'}: exists"),
        ((tmp_path / "broken", tmp_path / "new", 0), "bytes, "),
        ((run, tmp_path / "new", 513), "vocab_size=513: the checkpoint has 512 rows"),
        ((tmp_path / "lacking", tmp_path / "new", 0), "norm.weight: iter_0000005 has no such tensor"),
    ]:
        assert main(["export", str(source), str(out), "0", str(rows)]) == 2
        error = capsys.readouterr().err
        assert rule in error and error.count("\n") == 1, error
