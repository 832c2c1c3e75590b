"""Documents that people typed: tables in Markdown, the text around them, and log lines quoted between them."""

import csv

import pytest
from support import REPOSITORY
from test_log_dialects import m2021, m2022

from trilane.documents.document import read_document
from trilane.documents.markdown import cell, column
from trilane.documents.runs import read_runs

SHARED = REPOSITORY.parent / "shared"
SEEDS = sorted((SHARED / "seeds").glob("*.txt"))
TABLE = """# Runs

All on nodes of 8 gpus per node. Seq length is 2048.

NHIDDEN=14336 / NLAYERS=72

| Nodes | Size | DP | TP | PP | MBS |  GBS | Mem  | Sec/it | TFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: |  --: | ---: | -----: | -----: | ----: |
|    48 | 181B |  8 |  8 |  6 |   4 | 2048 | 56GB | 121.48 | 132.71 | 02-21 |
|    48 | 181B | 48 |  8 |  1 |   1 | 2016 | OOM  |        |        | 02-25 |
|    48 | 181B |  4 |  8 | 12 |   1 | 2048 | 30GB |  xxxx  |   xxxx | hangs |
|       |      |    |    |    |     |      |      |        |        |       |

- 1 node, 1 replica

20B model: TP=8, PP=1, NLAYERS=8, NHIDDEN=14400

"""


def runs(folder, text, name="a.md"):
    (folder / name).write_text(text)
    return read_runs(folder / name)


def test_each_measured_row_is_a_run_and_so_is_a_quoted_log(tmp_path):
    first, oom, hang, log = runs(tmp_path, TABLE + "```\n" + m2022(2) + "```\n")
    row = first.iterations.iloc[0]
    assert (first.dialect, first.status, row.sec_per_it, row.flops_per_s_per_gpu) == (
        "table",
        "completed",
        121.48,
        pytest.approx(132.71e12),
    )
    expected = {
        "nodes": 48,
        "size": 181,
        "tp": 8,
        "layers": 72,
        "hidden": 14336,
        "seq": 2048,
        "line": 9,
        "notes": "02-21",
    }
    assert {name: first.arguments[name] for name in expected} == expected
    assert "121.48" in first.evidence and first.memory["max_reserved"].max() == 56 * 2**30
    assert (oom.status, hang.status, len(oom.iterations)) == ("OOM", "hang", 0)
    assert (log.dialect, log.iterations["sec_per_it"].iloc[0]) == ("megatron-deepspeed-2022", 700.0)
    assert {n: log.arguments[n] for n in ("layers", "size", "nodes", "dp")} == {
        "layers": 8,
        "size": 20,
        "nodes": 1,
        "dp": 1,
    }


def test_a_row_without_a_time_takes_that_of_the_log_line_with_its_tflops(tmp_path):
    table = "\n| GPUs | TP | MBS | TFLOPs |\n| -: | -: | -: | -: |\n| 8 | 8 | 1 | 107.48 |\n| 16 | 8 | 1 | 99.00 |\n"
    _, timed, untimed = runs(tmp_path, "# a\n" + m2022(2) + table)
    assert (timed.iterations["sec_per_it"].iloc[0], len(untimed.iterations["sec_per_it"].dropna())) == (700.0, 0)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        *(("47GB", 47, "GB"), ("0.661s", 0.661, "s"), ("**181B**", 181, "B"), ("1_024", 1024, ""), ("1,024", 1024, "")),
        *(("`56 GiB`", 56, "GiB"), ("~30", 30, ""), ("3.2 it/s", 3.2, "it/s"), ("1e3", 1000, "")),
        *(("62,5", 62.5, ""), ("6,10", 6.1, ""), ("0,125", 0.125, ""), ("1234,567 s", 1234.567, "s")),
        *(("1,234.5", 1234.5, ""), ("1.024,5", 1024.5, ""), ("1.048.576", 1048576, ""), ("1.024", 1.024, "")),
        *(
            ("1 024", 1024, ""),
            ("1\u202f024", 1024, ""),
            ("1\u2009048\u2009576,5", 1048576.5, ""),
            ("-1,5e-3", -0.0015, ""),
        ),
    ],
)
def test_a_cell_is_a_number_and_its_unit(text, number, unit):
    assert (cell(text).number, cell(text).unit) == (number, unit)


@pytest.mark.parametrize("text", ["12.5.1", "1,2,4", "1 02", "1,0245,6", "", "x"])
def test_what_is_no_number_is_none(text):
    assert cell(text).number != cell(text).number


def test_half_of_the_last_digit_is_what_rounding_took():
    assert [cell(t).half for t in ("62,5", "62.50", "1,024", "1 024,5")] == [0.05, 0.005, 0.5, 0.05]


@pytest.mark.parametrize(
    ("header", "name", "unit"),
    [
        *(("Sec/it", "time", "s"), ("Mem (GiB)", "mem", "GiB"), ("NNODES", "nodes", ""), ("Time (ms)", "time", "ms")),
        *(("Glob-BS", "gbs", ""), ("TFLOP/s/GPU", "tflops", ""), ("mem_gb", "mem", "gb"), ("Loss", "", "")),
    ],
)
def test_columns_go_by_many_names(header, name, unit):
    assert column(header) == (name, unit)


def test_a_log_with_a_table_of_something_else_stays_a_log(tmp_path):
    other = "| name | size |\n| --- | --- |\n| word_embeddings | 3 |\n"
    (run,) = runs(tmp_path, other + m2021(1) + "\n" + m2021(2))
    assert (run.dialect, len(run.iterations)) == ("megatron-2021", 2)


def measured():
    path = SHARED / "measured/seeds_measured.csv"
    if not path.is_file():
        return []
    return [row for row in csv.DictReader(path.open()) if row["kind"] in ("table", "log_line")]


@pytest.mark.skipif(not SEEDS or not measured(), reason="the seed documents are not beside this checkout")
def test_the_seed_documents_are_their_216_timed_rows():
    """Against the rows as others wrote them down: the same lines, and equal in every number that we claim to read."""
    words = {"size": "model_size_b", "chunks": "pp_chunks"}
    names = ("gpus", "nodes", "size", "dp", "tp", "pp", "chunks", "mbs", "gbs", "layers", "hidden", "heads", "seq")
    found = {(p.name, run.arguments["line"]): run for p in SEEDS for run in read_runs(p)}
    truth = {(row["source_file"], int(row["line_no"])): row for row in measured()}
    timed = {
        place for place, run in found.items() if run.iterations.get("sec_per_it", run.iterations).notna().any(axis=None)
    }
    assert timed == {place for place, row in truth.items() if row["sec_per_it"]} and len(timed) == 216
    for place, run in found.items():
        row = truth[place]
        arguments = {n: float(v) for n in names if (v := run.arguments.get(n)) is not None}
        assert arguments == {name: float(row[words.get(name, name)]) for name in arguments}, place
        if row["sec_per_it"]:
            assert run.iterations["sec_per_it"].iloc[0] == float(row["sec_per_it"]), place
        if row["mem_gb"] and run.dialect == "table":
            assert run.memory["max_reserved"].iloc[0] / 2**30 == float(row["mem_gb"]), place
        assert (run.status == "OOM") == (row["oom"] == "1") and (run.status == "hang") == (row["hang"] == "1"), place


@pytest.mark.skipif(not SEEDS, reason="the seed documents are not beside this checkout")
@pytest.mark.parametrize("path", SEEDS, ids=lambda p: p.name[:3])
def test_every_row_of_a_seed_table_has_its_batch_and_its_machine(path):
    for row in read_document(path.read_text()).rows:
        assert row.number("gbs") > 0 and (row.number("gpus") > 0 or row.number("nodes") > 0), row.text
