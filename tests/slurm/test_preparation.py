"""Corpora that a job of one core prepares: which ones, by how many jobs, and what a training that waits shows."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Cluster, ended, one, plan, run_folder
from support import wait_until

from trilane.cli.app import main
from trilane.config.plan import Plan, read_plan
from trilane.slurm import checks, client, jobs, ledger
from trilane.slurm.preflight import check_job, refused
from trilane.slurm.sites import site
from trilane.utils.validation import to_mapping
from trilane.workspace import prepared_corpora

TEXT = "to be or not to be, that is the question\n" * 40


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus that counts as large, in jobs too."""
    monkeypatch.setattr(jobs, "SMALL_BYTES", 1000)
    made = tmp_path / "corpus.jsonl"
    made.write_text(json.dumps({"text": TEXT}) + "\n")
    return made


def unprepared(p: Plan, folder: Path, above: int = prepared_corpora.SMALL_BYTES) -> dict[str, int]:
    return prepared_corpora.unprepared(p.data.parts, folder, above)


def run_on(corpus: Path, name: str, source: str = "") -> Path:
    p = plan(name, corpus.parent / "data", nodes=1)
    return run_folder(corpus.parent, replace(p, data=replace(p.data, source=source or str(corpus))))


def in_job(folder: Path) -> "subprocess.CompletedProcess[str]":
    """The line of the job script about the corpus, with the small corpora of these tests taken for large ones."""
    code = "import sys; from trilane.engine.data import corpus; from trilane.workspace import prepared_corpora as p;"
    code += "p.unprepared.__defaults__ = (*p.unprepared.__defaults__[:-1], 1000);"
    code += "sys.exit(corpus.main(['--in-job', 'plan.json']))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_a_corpus_is_prepared_once_and_again_where_it_or_its_tokenizer_changes(corpus: Path) -> None:
    folder, relative = run_on(corpus, "one"), run_on(corpus, "two", "../corpus.jsonl")
    p = read_plan(folder / "plan.json")
    wanted = {str(corpus): corpus.stat().st_size}
    assert unprepared(p, folder, 1000) == wanted and not unprepared(p, folder)
    done = in_job(folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "trilane slurm prepare" in done.stderr
    made = jobs.prepare([folder], site("local"), REQUEST)
    assert made == {folder: "here"} and jobs.prepare([folder], site("local"), REQUEST) == {}
    done = in_job(relative)
    assert done.returncode == 0 and Path(done.stdout.strip()).with_suffix(".idx").exists()
    text, times = corpus.read_text(), corpus.stat()
    corpus.write_text(text.replace("question", "problem."))  # as long as before
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert unprepared(p, folder, 1000) == wanted
    jobs.prepare([folder], site("local"), REQUEST)
    (folder.parent / "data").rename(folder.parent / "lost")
    assert unprepared(p, folder, 1000) == wanted
    for name in prepared_corpora.BUILT_IN:
        assert not unprepared(replace(p, data=replace(p.data, source=name)), folder, 0)


def test_the_check_refuses_a_corpus_that_all_nodes_would_wait_for(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_on(corpus, "one")
    p = read_plan(folder / "plan.json")
    large = {str(corpus): 40_000_000_000}
    for name, answer in (("is_installed", True), ("require_answer", None), ("test_only", "")):
        monkeypatch.setattr(client, name, lambda *_, answer=answer: answer)  # as on a login node
    monkeypatch.setattr(checks, "unprepared", lambda *_: large)
    (found,) = (f for f in refused(check_job(p, SITE, REQUEST, folder)) if f.rule == "corpus")
    assert "40 GB of text are not prepared, and 1 nodes would wait" in found.message and "prepare" in found.remedy
    assert "corpus" not in {f.rule for f in check_job(p, site("local"), REQUEST, folder)}
    missing = replace(p, data=replace(p.data, source="corpus.jsonl"))  # in the folder above, which is not the job's
    assert "data" in {f.rule for f in refused(check_job(missing, SITE, REQUEST, folder))}
    monkeypatch.chdir(corpus.parent)
    assert "data" not in {f.rule for f in check_job(missing, site("local"), REQUEST, folder)}


def test_a_training_waits_for_the_job_that_prepares_its_corpus(
    cluster: Cluster, corpus: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, one corpus, one job; a corpus that cannot be prepared: the training never starts."""
    good, bad = [run_on(corpus, name) for name in ("one", "two")], corpus.with_name("bad.jsonl")
    bad.write_text('{"texts": "none"}\n' * 100)
    failing = run_on(corpus, "three", str(bad))
    for folder in (*good, failing):  # what trains does not matter here
        script = (folder / "job.sbatch").read_text()
        (folder / "job.sbatch").write_text(script[: script.index("set -euo")] + "sleep 300\n")
    where = corpus.with_name("site.json")
    where.write_text(json.dumps(to_mapping(replace(SITE, service_partition="prepost"))))
    asked = ["--site", str(where), "--account", "xyz@a100", "--time-limit", "00:10:00", "--signal-s", "60", "--json"]
    asked += [word for rule in ("script", "kill-on-bad-exit", "signal") for word in ("--allow", rule)]
    assert main(["slurm", "submit", *map(str, (*good, failing)), "--prepare", *asked]) == 0
    said = json.loads(capsys.readouterr().out)
    first, second, third = (said["preparing"][str(folder)] for folder in (*good, failing))
    assert first == second != third and set(ledger.job_ids(good[0])) == {said["submitted"][str(good[0])]}
    directives = (good[0] / "prepare.sbatch").read_text()
    assert "--partition=prepost" in directives and "--cpus-per-task=1\n" in directives and "gres" not in directives
    wait_until(lambda: one(good[1]).state == "RUNNING", 60, "the training begins")
    assert client.states([first])[first].state == "COMPLETED" and not jobs.prepare(good, SITE, REQUEST)
    found = ended(failing)
    assert found.state == "CANCELLED" and 'each line must be {"text"' in (failing / f"prepare-{third}.out").read_text()
    client.cancel([one(folder).id for folder in good])
