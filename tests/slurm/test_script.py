"""The scripts: recorded whole for every site and template, accepted by bash and shellcheck, closed to hostiles."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import small_plan

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.slurm import script, sites
from trilane.slurm.sites import JobRequest, Site

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTERS = {"v100-16g": "jz-v100-16g", "v100-32g": "jz-v100-32g", "a100": "jz-a100-80g", "h100": "jz-h100"}
PRESETS = [name for name in sites.catalogue() if name != "local"]
EVERYTHING = JobRequest(
    account="xyz@a100",
    time_limit="1-12:00:00",
    qos="qos_gpu_a100-t3",
    partition="gpu_p5",
    constraint="a100",
    reservation="hug",
    exclude="jean-zay-iam[01-03],jean-zay-iam11",
    mail="me@example.org",
    requeue=False,
    launcher="deepspeed",
    launch_blocking=True,
    nccl_debug="INFO",
    environment="conda:trilane",
)


def plan_for(site: Site, nodes: int = 2) -> Plan:
    """A GPT of 1.3B over two whole nodes of that site."""
    nodes_of = cluster(site.cluster or "jz-a100-80g")
    topology = Topology(
        tp=nodes_of.gpus_per_node // 2, pp=2, dp=nodes, mbs=1, gbs=64, precision="fp16", recompute="full"
    )
    shape = parse_shape("24,2048,16,2048,50304")
    return Plan(label="gpt-1b3", shape=shape, cluster=nodes_of, topology=topology)


def recorded(name: str) -> dict[str, str]:
    """Every template for that site, and a training that asks for everything."""
    site = sites.site(name)
    request = JobRequest(account=f"xyz{site.account_ending}", time_limit="02:00:00")
    texts = {t: script.render(t, plan_for(site), site, request) for t in script.NAMES}
    if name == "jean-zay-a100":
        texts["train-everything"] = script.render("train", plan_for(site), site, EVERYTHING)
    return {f"{template}-{name}.sbatch": text for template, text in texts.items()}


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "checkout", lambda: Path("/home/me/trilane"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_script_of_a_site_is_the_recorded_one(name: str) -> None:
    for file, text in recorded(name).items():
        assert text == (GOLDEN / file).read_text(), file


def test_nothing_is_recorded_that_no_template_makes() -> None:
    assert {p.name for p in GOLDEN.glob("*.sbatch")} == {file for name in PRESETS for file in recorded(name)}


def test_bash_and_shellcheck_accept_the_recorded_scripts() -> None:
    paths = sorted(GOLDEN.glob("*.sbatch"))
    for path in paths:
        subprocess.run(["bash", "-n", path], check=True)
    shellcheck = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1091", *paths]
    checked = subprocess.run(shellcheck, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_blank_is_given_and_every_given_value_is_used() -> None:
    given = script.blanks("train", plan_for(sites.site("generic")), sites.site("generic"), JobRequest())
    environment = script._environment(marked=False)
    assert {blank for name in script.NAMES for blank in script._blanks(environment, f"{name}.sbatch")} == set(given)


@pytest.mark.parametrize("wish", [f.name for f in dataclasses.fields(JobRequest)])
def test_every_wish_changes_a_script(wish: str) -> None:
    """A wish that no template has a place for would be lost without a word."""
    site, plan = sites.site("generic"), plan_for(sites.site("generic"))
    changed = {"signal_s": 60, "parallel": 2, "exclude": "n1"}.get(wish, getattr(EVERYTHING, wish))
    one = dataclasses.replace(JobRequest(), **{wish: changed})
    texts = [[script.render(t, plan, site, r) for t in ("train", "sweep")] for r in (JobRequest(), one)]
    assert texts[0] != texts[1]


def test_the_marks_stand_around_what_was_filled_in_and_nothing_else() -> None:
    site = sites.site("jean-zay-a100")
    marked = script.render("train", plan_for(site), site, EVERYTHING, marked=True)
    plain = script.render("train", plan_for(site), site, EVERYTHING)
    assert marked.replace(script.OPEN, "").replace(script.CLOSE, "") == plain
    assert f"--account={script.OPEN}xyz@a100{script.CLOSE}" in marked
    shown = script.as_html(marked)
    assert shown.count("<mark") == marked.count(script.OPEN)
    assert "&amp;1" in shown and script.OPEN not in shown


HOSTILE = [
    *("a b", "$(id)", "`id`", "x;id", "x\n#SBATCH --time=9", "-x", "--uid=0", "x'y", 'x"y', "x|y", "x&y", "${A}"),
    *("é", "数", "x\ty", "x\r", "x\\y", "x>y", "x<y", "x*", "x?", "~root", "!x", "#x", "x{a,b}", "x(y)", "\x00"),
    *("x\u2028y", "\u202ex", "x\u00a0y", "$IFS", "x\x1b[2J"),
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("wish", ["account", "constraint", "qos", "partition", "reservation", "mail", "exclude"])
def test_a_value_that_bash_or_sbatch_would_read_twice_is_refused(wish: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{wish}="):
        JobRequest(**{wish: value})


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_label_is_refused_and_a_hostile_path_is_quoted_never_executed(value: str, tmp_path: Path) -> None:
    site = sites.site("generic")
    with pytest.raises(ValueError, match=r"^label="):
        script.render("train", dataclasses.replace(plan_for(site), label=value), site, JobRequest())
    try:
        text = script.render("train", plan_for(site), site, JobRequest(environment=f"/venvs/{value}"))
    except ValueError as refusal:
        assert str(refusal).startswith("environment=") and not value.isprintable()
        return
    line = next(line for line in text.splitlines() if line.startswith("VENV="))
    said = subprocess.run(["bash", "-c", f'{line}; printf %s "$VENV"'], capture_output=True, text=True, cwd=tmp_path)
    assert (said.stdout, said.stderr, list(tmp_path.iterdir())) == (f"/venvs/{value}", "", [])


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"time_limit": "20h"}, r"^time_limit='20h': must be \[DAYS-\]HH:MM:SS"),
        ({"time_limit": "00:00:30"}, r"^time_limit=00:00:30: must be a minute or more$"),
        ({"time_limit": "00:05:00", "signal_s": 300}, r"^signal_s=300: must be less than time_limit=00:05:00$"),
        ({"launcher": "mpirun"}, r"^launcher=mpirun: known: deepspeed, torchrun$"),
        ({"parallel": 0}, r"^parallel=0: must be a whole number of at least 1$"),
        ({"nccl_debug": "info"}, r"^nccl_debug=info: .*known: INFO"),
    ],
)
def test_a_bad_wish_is_one_line(wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobRequest(**wishes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sites.site("jean-zay-a10"), r"^site=jean-zay-a10: did you mean jean-zay-a100\? known: generic"),
        (lambda: sites.site("nowhere.json"), r"^site=nowhere.json: no such file$"),
        (lambda: render(partition="gpu_p4"), r"^partition=gpu_p4: did you mean gpu_p5\? known: gpu_p5, prepost$"),
        (lambda: render(qos="qos_gpu_a100-t4"), r"^qos=qos_gpu_a100-t4: did you mean qos_gpu_a100-t3\?"),
        (lambda: render("trian"), r"^template=trian: did you mean train\?"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def render(template: str = "train", **wishes) -> str:
    site = sites.site("jean-zay-a100")
    return script.render(template, plan_for(site), site, JobRequest(**wishes))


def test_gpus_that_do_not_fill_their_nodes_are_refused() -> None:
    site = sites.site("jean-zay-a100")
    plan = dataclasses.replace(plan_for(site), topology=Topology(tp=4, dp=3, mbs=1, gbs=3))
    with pytest.raises(ValueError, match=r"^tp x pp x dp=12: must fill whole nodes of 8 GPUs$"):
        script.render("train", plan, site, JobRequest())


def test_a_site_of_ones_own_is_one_json_file_and_its_cluster_may_lie_beside_it(tmp_path: Path) -> None:
    from trilane.utils.validation import to_mapping

    (tmp_path / "nodes.json").write_text(json.dumps(to_mapping(small_plan().cluster)))
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine", "cluster": "nodes.json", "partition": "long"}))
    text = script.render("train", small_plan(), sites.site(str(tmp_path / "mine.json")), JobRequest())
    assert "#SBATCH --partition=long\n" in text and "--gres" not in text


@pytest.mark.parametrize("name", sites.catalogue())
def test_every_number_of_a_shipped_site_has_its_source(name: str) -> None:
    site = sites.site(name)
    told = " ".join(site.sources)
    assert site.sources and ("all" in told or all(word in told for word in ("constraint", "qos", "modules", "offline")))
    assert site.name == name
