"""What holds inside one process: the initial state, the order of samples, the groups of the optimizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plans import SHAPE, changed, small_plan

from trilane.config.training import Part

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "decoder.layers.3.mlp.linear_fc2.weight"])
def test_the_slices_of_a_tensor_make_up_the_whole(name: str) -> None:
    """By rows for the embedding, by columns for the second matrix of the MLP."""
    import torch

    from trilane.engine.model.parameters import initial_slice, initial_tensor, split_dim

    whole = initial_tensor(name, (64, 256), 1234, SHAPE)
    dim = split_dim(name)
    assert dim is not None
    local = [n // 4 if d == dim else n for d, n in enumerate(whole.shape)]
    parts = [initial_slice(name, local, rank, 4, 1234, SHAPE) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim), whole)


def test_tensors_differ_by_name_and_by_seed_and_not_by_call() -> None:
    import torch

    from trilane.engine.model.parameters import initial_tensor

    first, again = (initial_tensor("a.linear_fc1.weight", (64, 64), 1, SHAPE) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, initial_tensor("b.linear_fc1.weight", (64, 64), 1, SHAPE))
    assert not torch.equal(first, initial_tensor("a.linear_fc1.weight", (64, 64), 2, SHAPE))
    assert first.std().item() == pytest.approx(0.02, rel=0.05)


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    """0.02 / sqrt(2 L) with L = 4. Radford et al. 2019, section 2.3."""
    from trilane.engine.model.parameters import initial_tensor

    tensor = initial_tensor("decoder.layers.0.self_attention.linear_proj.weight", (256, 256), 1, SHAPE)
    assert tensor.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)


def test_every_parameter_is_audited_and_only_norms_and_biases_are_spared(ask: Callable, data: Path) -> None:
    """4 layers of 12 parameters, two embeddings, the last norm; per layer 4 weights decay, and both embeddings."""
    code = "from trilane.engine.interface import build\nfor item in build(plan, world).audit.items(): print(*item)"
    groups = dict(line.split(" ", 1) for line in ask(small_plan(data), code).splitlines())
    assert len(groups) == 4 * 12 + 4
    decayed = {name for name, group in groups.items() if group == "decay"}
    assert len(decayed) == 4 * 4 + 2
    assert all(name.endswith("weight") and "layernorm" not in name for name in decayed)


FEED = """
from dataclasses import replace
from trilane.engine.data.loader import SampleLoader
from trilane.config.batch_rampup import Batch
batch = Batch(number=3, first=16, gbs=8)
for cut in [{}, {"dp": 2}, {"dp": 4, "mbs": 1}, {"mbs": 8}]:
    many = replace(plan, topology=replace(plan.topology, **cut))
    feeds = [SampleLoader(many, world, (replica, many.topology.dp)) for replica in range(many.topology.dp)]
    rows = [tuple(row) for feed in feeds for part in feed.microbatches(batch) for row in part.tokens.tolist()]
    print(len(set(rows)), hash(tuple(sorted(rows))))
"""


def test_the_global_batch_is_the_same_whatever_dp_and_mbs(ask: Callable, data: Path) -> None:
    """Eight samples from the sixteenth on, no sample twice and none left out."""
    batches = ask(small_plan(data), FEED).splitlines()
    assert len(batches) == 4
    assert len(set(batches)) == 1
    assert batches[0].startswith("8 ")


MIX = """
from collections import Counter
from trilane.engine.data.loader import SampleLoader
from trilane.config.batch_rampup import Batch
feed = SampleLoader(plan, world, (0, 1))
counts = [Counter(int(feed._samples[k]["dataset_id"]) for k in range(n)) for n in (10, plan.samples)]
print(*([count[part] for part in range(len(plan.data.blend))] for count in counts), sep="; ")
for cut in [(0, 1), (0, 2), (1, 2)]:
    part = SampleLoader(plan, world, cut)
    print(*(hash(tuple(row)) for b in part.microbatches(Batch(number=1, first=8, gbs=8)) for row in b.tokens.tolist()))
"""


def test_a_blend_keeps_its_weights_from_the_first_samples_on_and_one_order(ask: Callable, data: Path) -> None:
    """3 : 1 over text and mock, 20 iterations of 8 samples, by megatron-core's blending; dp only deals them out."""
    parts = (Part(source="stdlib", weight=3), Part(source="mock", weight=1))
    plan = changed(small_plan(data), "data", source="blend", blend=parts)
    said = ask(plan, MIX).splitlines()
    assert said[0] in ("[8, 2]; [120, 40]", "[7, 3]; [120, 40]")
    one, first, second = (line.split() for line in said[1:])
    assert sorted(one) == sorted(first + second) and len(set(one)) == 8
    assert one[:2] + one[4:6] == first


def test_a_short_run_over_an_uneven_blend_has_its_samples(ask: Callable, data: Path, tmp_path: Path) -> None:
    """Seven sources of one percent are each asked for a whole sample of 16; megatron-core's own margin is too thin."""
    short = tmp_path / "short.txt"
    short.write_text("x" * 64 * 17)
    parts = (Part(source=str(short), weight=0.93), *[Part(source="mock", weight=0.01)] * 7)
    plan = changed(small_plan(data, iters=2), "data", source="blend", blend=parts)
    assert ask(plan, MIX).splitlines()[0].endswith("; [14, 1, 1, 0, 0, 0, 0, 0]")


GROUPS = """
import torch.distributed as dist
from trilane.engine.interface import build
make, asked = dist.new_group, set()
def made(*args, **options):
    asked.add(options.get("backend"))
    return make(*args, **options)
dist.new_group = made
build(plan, world)
print(asked)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "deepspeed-zero", "deepspeed-3d", "hf-zero3"])
def test_no_engine_asks_for_gloo_groups_beside_its_own(engine: str, ask: Callable, data: Path) -> None:
    """With NCCL they would be 384 processes' worth of TCP connections that nobody uses."""
    assert ask(small_plan(data, engine=engine, zero=1), GROUPS) == "{None}\n"
