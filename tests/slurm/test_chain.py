"""A chain's links: document 004's schedules, the stop switch, the target, the same failure again
and again.
"""

import json

import pytest
from slurm_cluster import links

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.config.training import Run
from trilane.slurm import chain, sites
from trilane.slurm.preflight import check_job, refused
from trilane.slurm.sites import JobRequest
from trilane.workspace.run import Run as RunFolder

# document 004's second table, as it prints it: nodes, batch size, micro batch size. Beside them the
# links that they become: nodes, mbs, smallest and largest batch size, last iteration. The ramp is
# that of the run which the document plans, 32 to 512 by 32 over 2,000,000 samples, and so is its
# length (bigscience-workshop/bigscience, train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm).
ON_16_GB = ((16, 32, 1), (16, 64, 2), (16, 128, 4), (32, 256, 4), (64, 512, 4))
LINKS_16_GB = [
    *((16, 1, 32, 32, 4167), (16, 2, 64, 64, 6251)),
    (16, 1, 96, 96, 7640),  # 32 replicas of mbs 2 cannot share 96: back to mbs 1
    (16, 4, 128, 128, 8682),
    (16, 1, 160, 224, 10805),
    (32, 4, 256, 256, 11326),
    (16, 1, 288, 480, 13828),
    (64, 4, 512, 512, 324634),
]
OF_THIS_MACHINE = {"wheel", "shared", "sbatch", "slurm", "disk"}  # what no laptop has


def test_document_004s_schedule_becomes_a_chain_in_which_nothing_is_refused(tmp_path, capsys):
    ramp = Ramp(start=32, increment=32, samples=2_000_000)
    run = Run(train_iters=ramp.iterations(161_132_812, 512), ramp=ramp, save_interval=1000)
    t = Topology(pp=2, dp=1, mbs=1, gbs=512, zero=1, precision="fp16", recompute="full")
    shape, nodes = parse_shape("24,2048,16,2048,50304"), cluster("jz-v100-16g")
    p = Plan(label="tr3m", engine="deepspeed-3d", shape=shape, cluster=nodes, topology=t, run=run)
    (tmp_path / "plan.json").write_text(json.dumps(p.to_json()))
    stages = ",".join(f"{gbs}:{nodes}:{mbs}" for nodes, gbs, mbs in ON_16_GB)
    command = ["slurm", "chain", f"{tmp_path}/plan.json", f"{tmp_path}/c"]
    command += ["--stages", stages, "--site", "jean-zay-v100-16g"]
    command += ["--account", "six@v100", "--time-limit", "20:00:00"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["links"]
    said = [(r["nodes"], r["mbs"], r["batches"][0], r["batches"][-1], r["last"]) for r in found]
    assert said == LINKS_16_GB
    assert {(n, b, m) for n, m, b, _, _ in said} >= set(ON_16_GB), (
        "every row of the document is a link"
    )
    paths, site = links(tmp_path / "c"), sites.site("jean-zay-v100-16g")
    request = JobRequest(account="six@v100", time_limit="20:00:00")
    plans = [read_plan(path / "plan.json") for path in paths]
    for path, link in zip(paths, plans, strict=True):
        found = {f.rule for f in refused(check_job(link, site, request, RunFolder(path)))}
        assert found <= OF_THIS_MACHINE, (path.name, found)
        unit = link.topology.mbs * link.topology.dp
        assert not any(batch.gbs % unit for batch in chain.phases(link))
    assert len({link.samples for link in plans}) == 1
    spans = [(link.run.start_iteration, link.run.goal) for link in plans]
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert [link.run.load for link in plans[1:]] == [str(path) for path in paths[:-1]]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("32:8:x", r"^stages=32:8:x: must be GBS:NODES:MBS"),
        ("64:8:1", r"^stages=64: the first must hold the ramp's first batch$"),
        ("128:8:1,32:8:1", r"^stages=128,32: must be in the order of the batch size$"),
        ("32:8:1,4096:8:1", r"^stages=4096: no iteration has such a batch"),
        ("32:8:1,128:24:1", r"^gbs=128: must be a multiple of mbs x dp$"),
    ],
)
def test_bad_stages_are_one_line(stages: str, message: str, tmp_path):
    """Of document 004's 1.3B on V100 nodes of four, its batch growing from 32 by 32."""
    ramp = Ramp(start=32, increment=32, samples=64_000)
    run = Run(train_iters=4000, ramp=ramp, save_interval=100)
    t, shape = Topology(gbs=128, precision="fp16"), parse_shape("24,2048,16,2048,50304")
    p = Plan(label="1b3", shape=shape, cluster=cluster("jz-v100-32g"), topology=t, run=run)
    with pytest.raises(ValueError, match=message):
        chain.links(p, chain.parse_stages(stages), tmp_path)
