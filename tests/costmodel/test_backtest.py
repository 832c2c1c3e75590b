"""Backtest: bad rows are named, and what a row leaves open is known; its figures are in
tests/answers/.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from trilane.analysis.recalibrate import fit
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.costmodel.backtest import backtest, figures
from trilane.costmodel.calibration import to_json
from trilane.costmodel.measured_rows import (
    read_rows,
)
from trilane.utils.validation import DATA

SCORED = DATA / "scored.csv"
HEADER = "row_id,cluster,gpu,gpus,layers,hidden,heads,seq,vocab_size,dp,tp,pp,mbs,gbs,zero,precision,sec_per_it"
GOOD = "x,jz-a100-80g,A100-80GB,384,72,14336,64,2048,250880,8,8,6,4,2048,1,fp16,114.1"


def written(folder: Path, text: str) -> Path:
    """A CSV of that text."""
    (folder / "rows.csv").write_text(text)
    return folder / "rows.csv"


def test_ten_rows_of_a_cluster_help_and_do_not_hurt(tmp_path):
    """Every seventh A100 row as calibration, on a cluster file of another name: the error of all
    rows falls.
    """
    rows = pd.read_csv(SCORED)
    timed = rows[
        (rows["cluster"] == "jz-a100-80g")
        & (rows["sec_per_it"] > 0)
        & (rows["date"] >= "2022-02-25")
    ]
    timed = timed.drop(columns=["cluster", "duplicate_of"])
    own = tmp_path / "own.json"
    own.write_text(json.dumps(to_json(fit(timed[::7][:10], "a100-800gbps").fitted)))
    cold, warm = (
        figures(backtest(timed, "a100-800gbps", calibration=name).runs) for name in ("", str(own))
    )
    assert warm["median"] < 0.05 and warm["p90"] < 0.15 and warm["median"] < cold["median"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",384,", ",512,", "gpus=512: unlike tp x cp x pp x dp = 384"),
        (",14336,", ",wide,", "hidden_size=wide: must be a whole number"),
        (",64,", ",4,", "tp=8: must divide num_attention_heads"),
        ("A100-80GB", "A100-40GB", "gpu=A100-40GB: jz-a100-80g has A100-80GB"),
        ("jz-a100-80g", "moon", "cluster=moon: known: a100-40g-8"),
        (",114.1", ",-3", "sec_per_it=-3: must be a number above zero"),
        (",114.1", ",114,1", "cell=1: stands beyond the last column; a decimal comma needs quotes"),
    ],
)
def test_a_bad_row_is_skipped_and_named(tmp_path, old, new, reason):
    assert old in GOOD
    path = written(tmp_path, f"{HEADER}\n{GOOD.replace(old, new, 1)}\n{GOOD}\n")
    rows, skipped, _ = read_rows([path])
    assert len(rows) == 1 and len(skipped) == 1
    assert skipped[0].row_id == "x" and skipped[0].reason.startswith(reason)


LLAMA = "x,jz-a100-80g,A100-80GB,8,32,4096,32,2048,32000,8,1,1,3,192,1,bf16,11.5"


def test_a_column_has_the_name_of_a_field_and_what_is_open_is_as_in_plan_show(tmp_path):
    names, cells = "tied_embeddings,ffn,kv_heads,activation,engine", "no,11008.0,8,swiglu,FSDP"
    text = f"{HEADER},{names}\n{LLAMA.replace(',1,bf16', ',,')},{cells}\n"
    (row,), skipped, _ = read_rows([written(tmp_path, text)])
    shape = replace(
        parse_shape("32,4096,32,2048,32000"), activation="swiglu", num_key_value_heads=8
    )
    shape = replace(shape, tied_embeddings=False, ffn_hidden_size=11008)
    topology = default_topology(shape, row.case.cluster, tp=1, pp=1, dp=8, mbs=3, gbs=192)
    topology = replace(
        topology, overlap_grad_reduce=True, zero=3
    )  # as the stack does where the row does not say
    assert not skipped and (row.case.shape, row.case.topology, row.stack) == (
        shape,
        topology,
        "fsdp",
    )


@pytest.mark.parametrize(
    ("name", "rows", "skipped"),
    [("dlperf_v100", 36, 0), ("dgxc_nemotron_h100", 24, 0), ("lucie_jz_a100_2024", 46, 6)],
)
def test_the_rows_of_other_cards_and_stacks_ship_with_their_sources(name, rows, skipped):
    """Six rows of Lucie are skipped: five have a batch or a number of GPUs that does not divide,
    one no micro-batch.
    """
    path = DATA / f"{name}.csv"
    read, refused, ignored = read_rows([path])
    assert (len(read), len(refused)) == (rows, skipped) and not ignored
    assert all(cells["source"] and cells["licence"] for cells in csv.DictReader(path.open()))
