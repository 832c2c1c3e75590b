"""A trained checkpoint is a model of transformers, which computes the same loss; and one of theirs a checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan, steps

from trilane.config.plan import Plan
from trilane.engine.parity import LLAMA_SHAPE
from trilane.workspace.checkpoints import name_of, read_manifest, write_manifest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ITERATIONS = 5


def llama(data: Path, **topology: int) -> Plan:
    """Shared key-value heads and a gated MLP, which tensor parallelism cuts each in its own way."""
    return replace(small_plan(data, iters=ITERATIONS, source="mock", **topology), shape=LLAMA_SHAPE)


@pytest.fixture(scope="module")
def trained(fork: Callable, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two stages of two, with a checkpoint before and one after its last iteration."""
    plan = changed(llama(data, tp=2, pp=2), "run", save_interval=ITERATIONS - 1)
    folder = run_folder(plan, tmp_path_factory.mktemp("export") / "run")
    fork(4, folder)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The command, and what it prints."""
    from trilane.engine.checkpoint.huggingface import main

    def run(direction: str, source: Path, out: Path) -> str:
        assert main([direction, str(source), str(out), "0", "0"]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def weights(checkpoint: Path) -> dict:
    from trilane.engine.checkpoint.slices import assemble

    tensors = read_manifest(checkpoint)["tensors"].items()
    return {n: assemble(checkpoint, t["slices"], "weight", tuple((0, size) for size in t["shape"])) for n, t in tensors}


SAMPLES = """
import torch
from trilane.engine.data.samples import SampleLoader
batch = list(plan.batches(plan.run.train_iters - 1))[0]
rows = SampleLoader(plan, world, (0, 1)).microbatches(batch)
torch.save([(row.tokens, row.labels) for row in rows], PATH)
"""


def test_transformers_computes_the_loss_of_the_next_iteration(
    trained: Path, command: Callable, ask: Callable, data: Path, tmp_path: Path
) -> None:
    """The loss of the last iteration belongs to the weights of the checkpoint before it."""
    import torch
    from transformers import LlamaForCausalLM

    model = tmp_path / "model"
    assert command("export", trained / "checkpoints" / name_of(ITERATIONS - 1), model) == f"{model}\n"
    ask(llama(data), f"PATH = {str(tmp_path / 'samples')!r}\n{SAMPLES}")
    tokens, labels = map(torch.cat, zip(*torch.load(tmp_path / "samples"), strict=True))
    with torch.no_grad():
        scores = LlamaForCausalLM.from_pretrained(model).eval()(tokens).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(steps(trained)[-1]["lm_loss"], abs=1e-5)


def test_there_and_back_is_the_same_model_and_a_plan_starts_from_it(
    trained: Path, command: Callable, fork: Callable, data: Path, tmp_path: Path
) -> None:
    """To the last bit; it has learned something already, and begins with the first iteration."""
    command("export", trained / "checkpoints" / name_of(ITERATIONS - 1), tmp_path / "model")
    back = command("import", tmp_path / "model", tmp_path / "imported")
    assert back == f"{tmp_path / 'imported/iter_0000000'}\n"
    before, after = weights(trained / "checkpoints" / name_of(ITERATIONS - 1)), weights(Path(back.strip()))
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
    plan = llama(data, dp=2, zero=1)
    folder = run_folder(changed(plan, "run", load=str(tmp_path / "imported")), tmp_path / "run")
    fork(2, folder)
    assert steps(folder)[0]["lm_loss"] < steps(trained)[0]["lm_loss"] - 0.5
    assert len(steps(folder)) == ITERATIONS


def broken(trained: Path, to: Path) -> Path:
    shutil.copytree(trained / "checkpoints" / name_of(ITERATIONS), to)
    next(to.glob("rank_*.safetensors")).write_bytes(b"")
    return to


def lacking(checkpoint: Path, to: Path) -> Path:
    """A copy whose manifest, intact by its checksum, has one tensor less."""
    shutil.copytree(checkpoint / "checkpoints" / name_of(ITERATIONS), to / name_of(ITERATIONS))
    manifest = read_manifest(to / name_of(ITERATIONS))
    del manifest["tensors"]["decoder.final_layernorm.weight"]
    write_manifest(to / name_of(ITERATIONS), manifest)
    return to


def test_what_cannot_be_exported_is_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from trilane.engine.checkpoint.huggingface import main

    (tmp_path / "there").mkdir()
    for (source, out, rows), rule in [
        ((tmp_path, tmp_path / "new", 0), f"checkpoint={tmp_path}: holds no complete checkpoint"),
        ((trained, tmp_path / "there", 0), f"out={tmp_path / 'there'}: exists"),
        ((broken(trained, tmp_path / "broken"), tmp_path / "new", 0), "bytes, "),
        ((trained, tmp_path / "new", 513), "vocab_size=513: the checkpoint has 512 rows"),
        ((lacking(trained, tmp_path / "lacking"), tmp_path / "new", 0), "norm.weight: iter_0000005 has no such tensor"),
    ]:
        assert main(["export", str(source), str(out), "0", str(rows)]) == 2
        error = capsys.readouterr().err
        assert rule in error and error.count("\n") == 1, error
