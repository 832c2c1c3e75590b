"""A chain's links: document 004's schedules, the stop switch, the target, the same failure again and again."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, plan
from support import small_plan

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.config.training import Run
from trilane.slurm import attempt, chain, client, jobs, ledger, sites
from trilane.slurm.preflight import check_job, refused
from trilane.slurm.sites import JobRequest
from trilane.workspace.checkpoints import name_of
from trilane.workspace.status import read_status

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def gpt_1b3(gbs: int, **topology: int) -> Plan:
    """Document 004's 1.3B on V100 nodes of four, its batch growing from 32 by 32."""
    run = Run(train_iters=4000, ramp=Ramp(start=32, increment=32, samples=64_000), save_interval=100)
    t = Topology(**{"mbs": 1, "dp": 1, "gbs": gbs, **topology}, precision="fp16")
    shape = parse_shape("24,2048,16,2048,50304")
    return Plan(label="1b3", shape=shape, cluster=cluster("jz-v100-32g"), topology=t, run=run)


# document 004's two tables, as it prints them: nodes, batch size, micro batch size. Beside them the links that they
# become: nodes, mbs, smallest and largest batch size, last iteration. The ramp is that of the run which the document
# plans, 32 to 512 by 32 over 2,000,000 samples, and so is its length
# (bigscience-workshop/bigscience, train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm).
ON_32_GB = ((8, 32, 1), (16, 64, 1), (32, 128, 1))
ON_16_GB = ((16, 32, 1), (16, 64, 2), (16, 128, 4), (32, 256, 4), (64, 512, 4))
LINKS_32_GB = [
    *((8, 1, 32, 32, 4167), (16, 1, 64, 64, 6251)),
    (8, 1, 96, 96, 7640),  # 64 replicas cannot share 96: back to 32
    (32, 1, 128, 128, 8682),
    (8, 1, 160, 480, 13828),  # nor 128 replicas 160, 192, ...
    (32, 1, 512, 512, 324634),
]
LINKS_16_GB = [
    *((16, 1, 32, 32, 4167), (16, 2, 64, 64, 6251)),
    (16, 1, 96, 96, 7640),
    (16, 4, 128, 128, 8682),
    (16, 1, 160, 224, 10805),
    (32, 4, 256, 256, 11326),
    (16, 1, 288, 480, 13828),
    (64, 4, 512, 512, 324634),
]
OF_THIS_MACHINE = {"wheel", "shared", "sbatch", "slurm", "disk"}  # what no laptop has


@pytest.mark.parametrize(
    ("rows", "gb", "pp", "recompute", "wanted"),
    [(ON_32_GB, 32, 1, "none", LINKS_32_GB), (ON_16_GB, 16, 2, "full", LINKS_16_GB)],
)
def test_document_004s_two_schedules_become_chains_in_which_nothing_is_refused(
    rows: tuple[tuple[int, int, int], ...],
    gb: int,
    pp: int,
    recompute: str,
    wanted: list[tuple[int, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    ramp = Ramp(start=32, increment=32, samples=2_000_000)
    run = Run(train_iters=ramp.iterations(161_132_812, 512), ramp=ramp, save_interval=1000)
    t = Topology(pp=pp, dp=1, mbs=1, gbs=512, zero=1, precision="fp16", recompute=recompute)
    shape, nodes = parse_shape("24,2048,16,2048,50304"), cluster(f"jz-v100-{gb}g")
    p = Plan(label="tr3m", engine="deepspeed-3d", shape=shape, cluster=nodes, topology=t, run=run)
    (tmp_path / "plan.json").write_text(json.dumps(p.to_json()))
    stages = ",".join(f"{gbs}:{nodes}:{mbs}" for nodes, gbs, mbs in rows)
    command = ["slurm", "chain", "create", str(tmp_path / "plan.json"), str(tmp_path / "c"), "--stages", stages]
    command += ["--site", f"jean-zay-v100-{gb}g", "--account", "six@v100", "--time-limit", "20:00:00"]
    assert main([*command, "--start", "2026-12-01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["links"]
    said = [(r["nodes"], r["mbs"], r["batches"][0], r["batches"][-1], r["last"]) for r in found]
    assert said == wanted
    assert {(n, b, m) for n, m, b, _, _ in said} >= set(rows), "every row of the document is a link"
    assert [row["begins"] for row in found] == ["2026-12-01T00:00", *(row["ends"] for row in found[:-1])]
    dates = [datetime.fromisoformat(row["ends"]) - datetime.fromisoformat(row["begins"]) for row in found]
    assert [d.total_seconds() / 3600 for d in dates] == pytest.approx([row["hours"] for row in found], abs=0.04)
    paths, site = chain.stages_of(tmp_path / "c"), sites.site(f"jean-zay-v100-{gb}g")
    request = JobRequest(account="six@v100", time_limit="20:00:00")
    for path, link in zip(paths, chain.read(tmp_path / "c"), strict=True):
        found = {f.rule for f in refused(check_job(link, site, request, path))}
        assert found <= OF_THIS_MACHINE, (path.name, found)
        assert not [batch for batch in chain.phases(link) if batch.gbs % (link.topology.mbs * link.topology.dp)]
    assert len({link.samples for link in chain.read(tmp_path / "c")}) == 1


def test_links_load_one_another_and_may_name_the_stage_of_96_themselves(tmp_path: Path) -> None:
    made = chain.links(gpt_1b3(128), chain.parse_stages("32:8:1,64:16:1,96:8:1,128:32:1"), tmp_path)
    assert [(p.topology.gpus, p.topology.dp, p.topology.mbs) for p in made] == [(n, n, 1) for n in (32, 64, 32, 128)]
    spans = [(p.run.start_iteration, p.run.goal) for p in made]
    assert spans[0][0] == 0 and spans[-1][1] == 4000
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert [p.run.load for p in made] == ["", *(str(tmp_path / p.label) for p in made[:-1])]
    assert made == chain.links(gpt_1b3(128), chain.parse_stages("32:8:1,64:16:1,128:32:1"), tmp_path)


def test_no_ramp_of_equal_steps_skips_96_alone() -> None:
    """Why the chain falls back instead: each ramp from 32 that passes 64 and 128 also passes 96, or a size below 64."""
    for increment in range(1, 481):
        if 480 % increment == 0:
            sizes = set(range(32, 513, increment))
            assert not {32, 64, 128, 512} <= sizes or 96 in sizes


def test_a_batch_that_no_stage_can_share_out_is_refused_by_its_size(tmp_path: Path) -> None:
    p = gpt_1b3(128)
    p = replace(p, run=replace(p.run, ramp=Ramp(start=32, increment=16, samples=64_000)))
    with pytest.raises(ValueError, match=r"^ramp=48: every batch size must be a multiple of mbs x dp = 1 x 32$"):
        chain.links(p, chain.parse_stages("32:8:1,64:16:1,128:32:1"), tmp_path)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("32:8", r"^stages=32:8: must be GBS:NODES:MBS"),
        ("32:8:x", r"^stages=32:8:x: must be GBS:NODES:MBS"),
        ("64:8:1", r"^stages=64: the first must hold the ramp's first batch$"),
        ("128:8:1,32:8:1", r"^stages=128,32: must be in the order of the batch size$"),
        ("32:8:1,4096:8:1", r"^stages=4096: no iteration has such a batch"),
        ("32:8:1,128:24:1", r"^gbs=128: must be a multiple of mbs x dp = 1 x 96$"),
        ("32:0:1", r"^nodes=0: must be a whole number of at least 1$"),
    ],
)
def test_bad_stages_are_one_line(stages: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        chain.links(gpt_1b3(128), chain.parse_stages(stages), tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = chain.create(tmp_path / "chain", plan("long", tmp_path / "data"), [], SITE, REQUEST)
    return made[0]


def at(folder: Path, iteration: int) -> None:
    (folder / "steps.jsonl").write_text("".join(f'{{"iteration": {n + 1}}}\n' for n in range(iteration)))


def newest(folder: Path, iteration: int) -> None:
    (folder / "checkpoints" / name_of(iteration)).mkdir(parents=True)
    (folder / "checkpoints/latest").write_text(f"{name_of(iteration)}\n")


def test_a_link_with_nothing_left_to_do_ends_before_it_begins(folder: Path) -> None:
    at(folder, 4)
    assert attempt.begin(folder, JOB).startswith("stop: done: iteration 4 of 4")
    assert not ledger.events(folder, "started")


def test_the_stop_switch_keeps_every_later_link_from_starting(folder: Path) -> None:
    (folder / "stop").touch()
    said = attempt.begin(folder, JOB)
    assert said.startswith("stop: ") and str(folder / "stop") in said
    (folder / "stop").unlink()
    assert attempt.begin(folder, JOB) == "go: from the beginning"


def test_the_same_early_failure_three_times_ends_the_chain_and_a_new_submission_begins_again(folder: Path) -> None:
    for _ in range(3):
        assert attempt.begin(folder, JOB).startswith("go: ")
        (folder / "run.log").write_text("RuntimeError: no such disk\n")
        assert attempt.end(folder, 1, JOB).status == "crashed"
    said = "stop: 3 attempts did not get beyond iteration 0: crashed: RuntimeError: no such disk"
    assert attempt.begin(folder, JOB) == said
    ledger.note(folder, "submitted", "8", site="test", script="")
    assert attempt.begin(folder, JOB) == "go: from the beginning"


def test_an_attempt_that_saved_nothing_is_put_aside_whole_and_nothing_is_lost(folder: Path) -> None:
    for number in (1, 2):
        attempt.begin(folder, JOB)
        at(folder, number)
        (folder / "run.log").write_text(f"RuntimeError: {number}\n")
        attempt.end(folder, 1, JOB)
    attempt.begin(folder, JOB)
    kept = [(folder / f"attempts/{n}/run.log").read_text() for n in (1, 2)]
    assert kept == ["RuntimeError: 1\n", "RuntimeError: 2\n"]
    assert read_status(folder / "attempts/2").evidence == "RuntimeError: 2"
    assert not (folder / "run.log").exists() and not (folder / "status.json").exists()


def test_an_attempt_goes_on_in_its_log_where_a_checkpoint_is_and_only_its_own_end_counts(folder: Path) -> None:
    attempt.begin(folder, JOB)
    newest(folder, 2)
    (folder / "run.log").write_text("START a\nCUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert attempt.end(folder, 1, JOB).status == "OOM"
    assert attempt.begin(folder, JOB) == "go: from iter_0000002"
    with (folder / "run.log").open("a") as log:
        log.write("START b\nValueError: gbs\n")
    assert attempt.end(folder, 1, JOB).evidence == "ValueError: gbs"


def test_a_link_waits_for_the_stage_before_it(tmp_path: Path) -> None:
    p = small_plan("ramp", train_iters=12, gbs=24)
    p = replace(p, cluster=replace(p.cluster, gpus_per_node=2, max_nodes=4))
    p = replace(p, run=replace(p.run, ramp=Ramp(start=8, increment=8, samples=64), save_interval=2))
    one, two = chain.create(tmp_path / "c", p, chain.parse_stages("8:1:2,24:2:2"), SITE, REQUEST)
    said = attempt.begin(two, JOB)
    assert said.startswith("stop: ramp-1-n1") and "0 of 6" in said
    at(one, 6)
    newest(one, 4)
    said = attempt.begin(two, JOB)
    assert said.startswith("stop: ramp-1-n1") and "6 of 6" in said and "iter_0000004" in said
    newest(one, 6)
    assert attempt.begin(two, JOB) == "go: from the beginning"


def test_a_last_save_that_was_cut_off_leaves_something_to_do(folder: Path) -> None:
    p = read_plan(folder / "plan.json")
    (folder / "plan.json").write_text(json.dumps(replace(p, run=replace(p.run, save_interval=2)).to_json()))
    at(folder, 4)
    newest(folder, 2)
    assert attempt.begin(folder, JOB) == "go: from iter_0000002"
    newest(folder, 4)
    assert attempt.begin(folder, JOB).startswith("stop: done: iteration 4 of 4")


def test_a_folder_in_which_another_job_trains_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt.begin(folder, {"SLURM_JOB_ID": "6"})
    known = {"6": client.JobState(id="6", state="RUNNING")}
    monkeypatch.setattr(client, "states", lambda ids: {job: known[job] for job in ids})
    assert attempt.begin(folder, JOB) == "stop: job 6 trains here"
    assert attempt.begin(folder, {"SLURM_JOB_ID": "6"}).startswith("go: "), "the same job, requeued"
    known["6"] = client.JobState(id="6", state="NODE_FAIL")
    assert attempt.begin(folder, JOB).startswith("go: ")


def test_the_command_shows_what_each_link_costs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(gpt_1b3(128).to_json()))
    command = [
        "slurm",
        "chain",
        "create",
        str(tmp_path / "plan.json"),
        str(tmp_path / "c"),
        "--site",
        "jean-zay-v100-32g",
    ]
    assert main([*command, "--account", "xyz@v100", "--stages", "32:8:1,64:8:2,96:8:1,128:32:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["links"]
    assert [row["gpus"] for row in found] == [32, 32, 32, 128]
    assert all(row["gpu_hours"] == pytest.approx(row["hours"] * row["gpus"]) for row in found)
    assert main([*command, "--account", "xyz@v100"]) == 0  # another chain in the same folder, with its own run folder
    assert main(["slurm", "chain", "status", str(tmp_path / "c"), "--json"]) == 0
    assert [j["verdict"] for j in json.loads(capsys.readouterr().out.split("\n", 1)[1])["jobs"]] == ["not submitted"]
    assert main([*command, "--account", "xyz@v100"]) == 2
    assert "exists; take a new one" in capsys.readouterr().err


def test_a_run_here_is_submitted_by_the_same_call(folder: Path) -> None:
    """At site `local` (the launcher itself is tested elsewhere): refused where more than one node is needed."""
    from trilane.slurm.sites import site

    with pytest.raises(ValueError, match=r"^tp x pp x dp=4: one machine starts at most the 2 processes"):
        jobs.submit(folder, site("local"), REQUEST)


def test_a_link_of_a_chain_costs_its_own_iterations(tmp_path: Path) -> None:
    """Iterations 31 to 90, of a minute each, on four GPUs: four GPU-hours."""
    p = plan("one", tmp_path, nodes=2)
    assert p.topology.gpus == 4
    part = replace(p, run=replace(p.run, train_iters=100, start_iteration=30, exit_iteration=90, load="before"))
    assert chain.gpu_hours(part, 60.0) == pytest.approx(4.0)
