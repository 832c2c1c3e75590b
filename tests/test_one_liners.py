"""What a user of notebooks types, guessing: it works, or ends in a line that names what does."""

import dataclasses
import json

import pandas as pd
import pytest
from support import REPOSITORY

import trilane
from trilane.config.plan import Plan

SMALL = "24,2048,16,2048,50304"
ON = {"cluster": "jz-v100-32g", "gpus": 32, "gbs": 512}
ROW = {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048}
ROW |= {"vocab_size": 50304, "tp": 1, "pp": 1, "dp": 32, "mbs": 4, "gbs": 512}
FOREIGN = {"n_layers": 24, "d_model": 2048, "n_heads": 16, "seq_len": 2048, "tp": 1, "pp": 1}
FOREIGN |= {"dp": 32, "step_time (ms)": 900.0, "world_size": 32, "global_batch_size": 512}
FOREIGN |= {"micro_batch_size": 4, "vocab_size": 50304}
LINES = """
found.to_frame().plot.scatter(x="memory_gib", y="sec_per_it")
found.to_frame().query("tp == 4")
found.to_frame().sort_values("memory_gib")
trilane.search(SMALL, **ON, tp=4)
trilane.search(config, **ON)
trilane.predict(found.to_frame()[:3], "jz-v100-32g")
trilane.predict(plan, "jz-h100")
trilane.predict(plan).to_frame()
trilane.predict(plan).plot()
trilane.predict([plan, found[1].plan])
trilane.predict(ROW, "jz-v100-32g")
dataclasses.replace(machine, network_bytes_per_s=5e10)
trilane.forecast(REPOSITORY / "docs/plan-176b.json", tokens="300B")
trilane.fit(found.to_frame()[:4].assign(sec_per_it=1.0), "jz-v100-32g")
trilane.read_plan(REPOSITORY / "docs/plan-176b.json")
trilane.explain(plan)
len(found)
found[0]
found[:5]
list(found)
[x.tp for x in found]
found.best()
found.best(3)
found.filter(tp=4)
found.filter("memory_gib < 20")
found.head()
(plan.tp, plan.pp, plan.dp, plan.mbs, plan.gbs, plan.zero)
plan.gpus
plan.replace(tp=2)
plan.replace(cluster="jz-h100")
plan == trilane.read_plan(plan.save(folder / "my.json"))
plan.to_frame()
machine.replace(network_bytes_per_s=5e10)
machine.replace(max_nodes=2048)
trilane.clusters()
trilane.clusters().to_frame()
c.summary()
c.days(0.5)
c.gpu_hours(0.5)
"""
ENDS = {  # one line that names what does
    "trilane.explain(plan, found[1].plan)": "predict",
    "trilane.search(SMALL, **ON, memory_limit=40)": "known: ",
    "plan.replace(tensor_parallel=2)": "known: ",
    "plan.replace(tp=3)": "must divide the 32 GPUs",
    "found.filter(tensor=2)": "known: ",
}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    import matplotlib as mpl

    mpl.use("Agg")
    folder = tmp_path_factory.mktemp("typed")
    config = folder / "config.json"
    names = {"n_layer": 24, "n_embd": 2048, "n_head": 16, "n_positions": 2048}
    config.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 50304, **names}))
    found = trilane.search(SMALL, **ON, top=20)
    plan = found[0].plan
    c = trilane.forecast(plan, tokens="30B", runs=100)
    machine = trilane.load_cluster("jz-v100-32g")
    given = {"found": found, "plan": plan, "c": c, "machine": machine}
    modules = {"trilane": trilane, "dataclasses": dataclasses, "REPOSITORY": REPOSITORY}
    texts = {"SMALL": SMALL, "ON": ON, "ROW": ROW, "config": str(config), "folder": folder}
    return {**given, **modules, **texts}


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_line_as_users_guess_it_works(line, typed):
    assert eval(line, typed) is not None


@pytest.mark.parametrize("line", ENDS)
def test_another_ends_in_a_line_that_names_what_does(line, typed):
    with pytest.raises(ValueError) as caught:
        eval(line, typed)
    assert ENDS[line] in str(caught.value) and "\n" not in str(caught.value)


def test_another_tp_keeps_the_gpus_and_says_itself(typed):
    plan: Plan = typed["plan"].replace(tp=2, pp=2, interleaving=1)
    assert plan.gpus == 32 and plan.tp == 2 and "tp2-pp2" in plan.label
    moved = plan.replace(cluster="jz-h100")
    assert trilane.predict(moved) == trilane.predict(plan, "jz-h100")


def test_foreign_columns_are_all_proposed_at_once():
    with pytest.warns(UserWarning) as caught:
        trilane.predict(pd.DataFrame([FOREIGN]), "jz-v100-32g")
    text = " ".join(str(warning.message) for warning in caught)
    for name in ("num_layers", "hidden_size", "seq_length", "sec_per_it", "gpus", "gbs", "mbs"):
        assert f"call it {name}" in text, name
