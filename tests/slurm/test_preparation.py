"""Corpora that a job of one core prepares: which ones, by how many jobs, and what a training that
waits shows.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, plan, run_folder

from trilane.config.plan import Plan, read_plan
from trilane.launch import local
from trilane.slurm import client, preflight
from trilane.slurm.preflight import check_job, refused
from trilane.workspace import prepared_corpora
from trilane.workspace.run import Run

TEXT = "to be or not to be, that is the question\n" * 40


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A corpus that these tests count as large."""
    made = tmp_path / "corpus.jsonl"
    made.write_text(json.dumps({"text": TEXT}) + "\n")
    return made


def unprepared(p: Plan, folder: Path, above: int = prepared_corpora.SMALL_BYTES) -> dict[str, int]:
    return prepared_corpora.unprepared(p.data.parts, folder, above)


def run_on(corpus: Path, name: str, source: str = "") -> Path:
    p = plan(name, corpus.parent / "data", nodes=1)
    return run_folder(corpus.parent, replace(p, data=replace(p.data, source=source or str(corpus))))


def in_job(folder: Path) -> "subprocess.CompletedProcess[str]":
    """The line of the job script about the corpus, with the small corpora of these tests taken for
    large ones.
    """
    code = "import sys; from trilane_engine.data import corpus; from trilane.workspace import prepared_corpora as p;"
    code += "p.unprepared.__defaults__ = (*p.unprepared.__defaults__[:-1], 1000);"
    code += "sys.exit(corpus.main(['--in-job', 'plan.json']))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_a_corpus_is_prepared_once_and_again_where_it_or_its_tokenizer_changes(
    corpus: Path,
):
    folder, relative = run_on(corpus, "one"), run_on(corpus, "two", "../corpus.jsonl")
    p = read_plan(folder / "plan.json")
    wanted = {str(corpus): corpus.stat().st_size}
    assert unprepared(p, folder, 1000) == wanted and not unprepared(p, folder)
    done = in_job(folder)
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "--template prepare" in done.stderr
    )
    local.prepare_data(folder / "plan.json")
    assert unprepared(p, folder, 1000) == {}
    done = in_job(relative)
    assert done.returncode == 0 and Path(done.stdout.strip()).with_suffix(".idx").exists()
    text, times = corpus.read_text(), corpus.stat()
    corpus.write_text(text.replace("question", "problem."))  # as long as before
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert unprepared(p, folder, 1000) == wanted


def test_the_check_refuses_a_corpus_that_all_nodes_would_wait_for(corpus: Path, monkeypatch):
    folder = run_on(corpus, "one")
    p = read_plan(folder / "plan.json")
    large = {str(corpus): 40_000_000_000}
    for name, answer in (("is_installed", True), ("require_answer", None), ("test_only", "")):
        monkeypatch.setattr(client, name, lambda *_, answer=answer: answer)  # as on a login node
    monkeypatch.setattr(preflight, "unprepared", lambda *_: large)
    (found,) = (f for f in refused(check_job(p, SITE, REQUEST, Run(folder))) if f.rule == "corpus")
    assert (
        "40 GB of text are not prepared, and 1 nodes would wait" in found.message
        and "prepare" in found.remedy
    )
