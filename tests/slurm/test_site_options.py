"""A site of one's own: what its file adds to the scripts, as bash and sbatch read it; contradictions in one line."""

import re
from dataclasses import replace
from typing import Any

import pytest
from support import small_plan
from test_script import EVERYTHING, directives, plan_for

from trilane.slurm import script, sites
from trilane.slurm.site_options import OWN_DIRECTIVES, OWN_VARIABLES, srun_arguments
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.validation import from_mapping

FREE = Site(
    name="mine",
    cluster="jz-a100-80g",
    env={"NCCL_SOCKET_IFNAME": "ib0", "QUOTED": "it's $HOME"},
    setup=("module load cuda", "source /opt/env.sh"),
    sbatch={"licenses": "scratch", "contiguous": ""},
    srun=("--mpi=none", "--label"),
    mem="0",
    exclusive=True,
    switches="1@12:00:00",
    gpu_type="a100",
)
NAME = re.compile(r"(?:^|\s)([A-Z_]+)(?==|\s|$)")


def rendered(site: Site, **wishes: Any) -> str:
    return script.render("train", plan_for(site), site, JobRequest(**wishes))


def test_every_further_option_of_a_site_is_one_directive() -> None:
    found = directives(rendered(FREE))
    wanted = {"gres": "gpu:a100:8", "mem": "0", "exclusive": "", "switches": "1@12:00:00"}
    assert found.items() >= {**wanted, "licenses": "scratch", "contiguous": ""}.items()
    blocks = directives(rendered(replace(FREE, switches="", segment=16, gpu_option="gpus-per-node")))
    assert (blocks["segment"], blocks["gpus-per-node"], "gres" in blocks) == ("16", "a100:8", False)


BAD = [
    ({"env": {"A-B": "1"}}, r"^site.env='A-B': must be the name of a variable"),
    ({"env": {"PATH": "/opt"}}, r"^site.env=PATH: is set by the script or by SLURM; extend it in a line of setup$"),
    ({"env": {"SLURM_NTASKS": "1"}}, r"^site.env=SLURM_NTASKS: is set"),
    ({"env": {"A": "x\ny"}}, r"^site.env.A=.*must be one line"),
    ({"setup": ["module load a", "x\ny"]}, r"^site.setup, line 2=.*must be one line"),
    ({"setup": [" "]}, r"^site.setup, line 1=' ': is empty$"),
    ({"sbatch": {"time": "1"}}, r"^site.sbatch=--time: the script sets --time itself"),
    ({"sbatch": {"gre": "1"}}, r"^site.sbatch=--gre: the script sets --gres itself"),
    ({"sbatch": {"x\n#SBATCH --uid": "0"}}, r"^site.sbatch=.*must be the long name of an option"),
    ({"sbatch": {"licenses": "a\n#SBATCH --uid=0"}}, r"^site.sbatch.licenses=.*must consist of letters"),
    ({"srun": ["-n1"]}, r"^site.srun='-n1': must be a long option"),
    ({"srun": ["--ntasks=4"]}, r"^site.srun=--ntasks=4: the script sets --ntasks itself"),
    ({"srun": ["--output=x"]}, r"^site.srun=--output=x: the script sets --output itself"),
    ({"mem": "lots"}, r"^site.mem='lots': must be such as 480G"),
    ({"mem": "0", "sbatch": {"mem-per-gpu": "60G"}}, r"^site.mem=0: contradicts site.sbatch mem-per-gpu$"),
    ({"mem": "480G", "exclusive": True}, r"^site.mem=480G: with exclusive must be 0"),
    ({"switches": "1", "segment": 16}, r"^site.switches=1: cannot be combined with segment"),
    ({"switches": "one"}, r"^site.switches='one': must be a number of switches"),
    ({"segment": -1}, r"^site.segment=-1: must be a whole number"),
    ({"gpu_type": "a100:4"}, r"^site.gpu_type=a100:4: must be one type"),
    ({"gpu_option": "gpus"}, r"^site.gpu_option=gpus: known: "),
    ({"container": "docker"}, r"^site.container=docker: .*known: "),
    ({"container": "pyxis"}, r"^site.container=pyxis: needs container_image$"),
    ({"container_image": "/a.sif"}, r"^site.container_image=/a.sif: needs container, one of pyxis, apptainer"),
    ({"container_mounts": ["/a"]}, r"^site.container_mounts=/a: needs container"),
    (
        {"container": "apptainer", "container_image": "/a.sif", "srun": ["--container-image=b"]},
        r"^site.srun=--container-image: contradicts site.container=apptainer$",
    ),
    (
        {"container": "pyxis", "container_image": "/a.sqsh", "srun": ["--container-mounts=/a"]},
        r"^site.srun=--container-mounts: is what container_image and container_mounts set$",
    ),
    ({"container": "pyxis", "container_image": "a.sqsh"}, r"^site.container_image=a.sqsh: must be an absolute path"),
    (
        {"container": "pyxis", "container_image": "/a.sqsh", "container_mounts": ["a"]},
        r"^site.container_mounts=a: must be FOLDER",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_site_with_a_contradiction_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        from_mapping(Site, {"name": "mine", **fields}, "site")
    assert len(str(refusal.value).splitlines()) == 1


def test_no_site_can_set_an_option_that_a_script_sets() -> None:
    """The other half of the check: what the scripts set is what a site may not."""
    everything = replace(FREE, hint="nomultithread", sbatch={}, partition="long", constraint="a100")
    blocks = replace(everything, switches="", segment=2, gpu_option="gpus-per-node")
    texts = [script.render(t, plan_for(s), s, JobRequest()) for t in script.NAMES for s in (everything, blocks)]
    texts.append(script.render("train", plan_for(everything), everything, EVERYTHING))
    texts.append(script.render("train", plan_for(blocks), blocks, replace(EVERYTHING, launcher="srun", spares=1)))
    assert {option for text in texts for option in directives(text)} <= set(OWN_DIRECTIVES)
    exported = {
        name
        for text in texts
        for line in re.findall(r"^\s*export ([^#\n]*)", text, re.M)
        for name in NAME.findall(line)
    }
    own = {name for name in exported if not name.startswith(("SLURM_", "SRUN_"))} - set(FREE.env)
    assert len(own) > 10 and own <= set(OWN_VARIABLES)


def test_ones_own_comment_is_a_directive_of_its_own() -> None:
    assert directives(rendered(FREE, comment="for Ada (2)"))["comment"] == '"for Ada (2)"'
    with pytest.raises(ValueError, match=r"^comment="):
        JobRequest(comment='x"\n#SBATCH --uid=0')


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_arguments_of_srun_are_words_of_bash_and_a_container_ends_them(launcher: str) -> None:
    bound = "--cpu-bind=cores " if launcher == "srun" else ""
    assert srun_arguments(FREE, launcher) == f"--mpi=none --label {bound}"
    assert srun_arguments(replace(FREE, srun=("--cpu-bind=none",)), launcher) == "--cpu-bind=none "
    assert srun_arguments(sites.site("generic"), "torchrun") == ""
    inside = replace(
        FREE, srun=(), container="apptainer", container_image="/my images/a.sif", container_mounts=("/data",)
    )
    words = 'apptainer exec --nv --bind "$PWD" --pwd "$PWD" --bind /data \'/my images/a.sif\' '
    assert srun_arguments(inside, launcher) == bound + words
    pyxis = replace(inside, container="pyxis", container_mounts=("/data", "/a:/b:ro"))
    mounts = '--container-mounts="$PWD:$PWD",/data:/data,/a:/b:ro'
    words = f"--container-image='/my images/a.sif' {mounts} --container-workdir=\"$PWD\" "
    assert srun_arguments(pyxis, launcher) == bound + words


def test_a_cpu_cluster_asks_for_no_gpu_of_any_type() -> None:
    site = replace(FREE, cluster="")
    assert "gres" not in directives(script.render("train", small_plan(), site, JobRequest()))
