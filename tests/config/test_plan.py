"""A plan: its learning rate, its id and label, the words of its fields."""

import dataclasses

import pytest
from support import REPOSITORY, small_plan

from trilane.config import options
from trilane.config.options import option
from trilane.config.parallelism import Topology
from trilane.config.plan import read_plan
from trilane.config.training import Optimizer


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        (50, 0.5),
        (100, 1.0),
        (600, 0.55),
        (1100, 0.1),
    ],
)
def test_the_rate_is_that_of_megatrons_cosine(samples: int, rate: float) -> None:
    """Warm-up over 100 samples to 1, cosine to 0.1 at 1100: the mean at 600, and cos 45 degrees
    between.
    """
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup_samples=100, decay_samples=1100)
    assert optimizer.learning_rate(samples, 9999) == pytest.approx(rate, rel=1e-6)


def test_the_id_of_a_plan_is_of_what_changes_its_prediction_and_not_of_defaults(
    monkeypatch,
) -> None:
    """A field that is added, at its default, changes no id; one that no prediction depends on never
    does.
    """
    plan = read_plan(REPOSITORY / "docs/plan-176b.json")
    replaced = dataclasses.replace
    same = replaced(
        plan,
        label="x",
        run=replaced(plan.run, seed=1),
        shape=replaced(plan.shape, norm_epsilon=1e-6),
    )
    other = replaced(plan, topology=replaced(plan.topology, recompute="none"))
    assert same.id == plan.id != other.id
    added = dataclasses.make_dataclass(
        "Topology", [("new", int, option(0))], bases=(Topology,), kw_only=True, frozen=True
    )
    assert options.changed(added(tp=2)) == options.changed(Topology(tp=2)) == {"tp": 2}
    assert options.changed(added(tp=2, new=1)) == {"tp": 2, "new": 1}


def test_a_label_names_every_choice_beyond_the_defaults_in_the_order_of_the_fields() -> None:
    t = Topology(tp=2, pp=2, mbs=4, gbs=8, zero=1, recompute="full", adam="torch", cp=2)
    assert t.label == "tp2-pp2-dp1-mbs4-cp2-zero1-full-torchadam"


def test_every_field_of_a_plan_has_its_words() -> None:
    plan = small_plan()
    for value in (plan, *vars(plan).values()):
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            assert [f.name for f in fields if not f.metadata.get("help")] == [], type(value)
