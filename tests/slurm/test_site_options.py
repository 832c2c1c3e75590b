"""A site of one's own: what its file adds to the scripts, as bash and sbatch read it;
contradictions in one line.
"""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_script import directives, plan_for

from trilane.slurm import script
from trilane.slurm.script import srun_arguments
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.tables import printable
from trilane.utils.validation import from_mapping

FREE = Site(
    name="mine",
    cluster="jz-a100-80g",
    env={
        "NCCL_SOCKET_IFNAME": "ib0",
        "QUOTED": "it's $HOME",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_IB_PKEY": "1",
    },
    setup=(
        "module load cuda",
        "source /opt/env.sh",
        "export HF_TOKEN=$(cat ~/.token) HF_TOKEN_PATH=/x MAX_TOKENS=3",
    ),
    sbatch={"licenses": "scratch", "exclusive": "", "mem": "0", "switches": "1@12:00:00"},
    srun=("--mpi=none", "--label"),
    gpu_type="a100",
)


def rendered(site: Site, **wishes: Any) -> str:
    return script.render("train", plan_for(site), site, JobRequest(**wishes))


# in the forms of detect-secrets' plugins
PREFIXES = "hf_ nvapi-Ab1Ab1Ab1Ab1Ab1Ab1Ab1Ab1 github_pat_ ghp_ glpat- sk-proj- xoxb- npm_ eyJhbGciOiJIUzI1NiJ9."
SECRETS = [f"{start}{'Ab1' * 12}!" for start in PREFIXES.split()]
SECRETS += [f"Bearer {'A1' * 8}!", f"AKIA{'A1' * 8}!", "-----BEGIN OPENSSH PRIVATE KEY-----!"]


BAD = [
    ({"env": {"A-B": "1"}}, r"^site.env='A-B': must be the name of a variable"),
    (
        {"env": {"PATH": "/opt"}},
        r"^site.env=PATH: is set by the script, by bash or by SLURM; extend a path in a line of setup",
    ),
    ({"env": {"TRILANE_WEBHOOK": "https://x/y"}}, r"^site.env=TRILANE_WEBHOOK: .*line of setup$"),
    *(
        ({field: value}, rf"^site.{field}={name}: looks like a secret[^!]*setup$")
        for field, value, name in (
            ("env", {"http_proxy": "http://me:!@proxy:3128"}, "password in an address"),
            ("setup", ["module load a; export MY_SECRET='!'"], "MY_SECRET"),
            ("sbatch", {"export": "ALL,WANDB_API_KEY=abc"}, "WANDB_API_KEY"),
            ("srun", ["--export=ALL,GITHUB_TOKEN=!"], "GITHUB_TOKEN"),
            *(("setup", [f"a {value}"], "token or key") for value in SECRETS),
        )
    ),
    *(
        ({field: value}, f"^site.{field}={name}: would run other code than the script$")
        for field, value, name in (
            ("env", {"BASH_ENV": "/x"}, "BASH_ENV"),
            ("srun", ["--export=ALL,LD_PRELOAD=/x"], "LD_PRELOAD"),
            ("sbatch", {"chd": "/x"}, "--chd"),
            ("sbatch", {"uid": "0"}, "--uid"),
        )
    ),
    ({"setup": ["module load a", "x\ny"]}, r"^site.setup, line 2=.*must be one line"),
    ({"sbatch": {"x\n#SBATCH --uid": "0"}}, r"^site.sbatch=.*must be one line"),
    ({"host_suffix": "i; touch x"}, r"^site.host_suffix='i; touch x': must be letters"),
    ({"responses": {"hang": "stop"}}, "^site.responses.hang=stop: must be a list"),
    ({"container": "pyxis"}, r"^site.container=pyxis: and container_image need each other"),
    (
        {"container": "pyxis", "container_image": "/a.sqsh", "container_mounts": ["a"]},
        r"^site.container_mounts='a': must be FOLDER",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_site_with_a_contradiction_is_refused_in_one_line(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refusal:
        from_mapping(Site, {"name": "mine", **fields}, "site")
    assert len(str(refusal.value).splitlines()) == 1


def test_no_text_of_a_command_or_report_shows_a_secret():
    """JSON stays JSON; what is no secret stays, too."""
    texts = [*SECRETS, "x://me:!@b", "HF_TOKEN='!'", "TOKENS=3"]
    kept = ["x://(hidden)@b", "HF_TOKEN='(hidden)'", "TOKENS=3"]
    assert json.loads(printable(json.dumps(texts))) == ["(hidden)!"] * len(SECRETS) + kept


def test_no_site_can_set_what_a_script_sets():
    """Options in any abbreviation, and variables; of some names no script needs to be looked at."""
    given = directives(rendered(FREE))
    for option in (*set(given) - set(FREE.sbatch), "gre", "tim"):
        with pytest.raises(ValueError, match=f"^site.sbatch=--{option}: the script sets --"):
            rendered(replace(FREE, sbatch={option: "1"}))
    pyxis = replace(FREE, container="pyxis", container_image="/a.sqsh")
    for site, word in (
        (FREE, "--ntasks=4"),
        (FREE, "--kill-on-bad-exit=0"),
        (pyxis, "--container-image=b"),
    ):
        with pytest.raises(ValueError, match=f"^site.srun={word}: the script sets --"):
            rendered(replace(site, srun=(word,)), spares=1)
    for name in ("MASTER_ADDR", "OMP_NUM_THREADS", "VENV", "RDZV_ID"):
        with pytest.raises(ValueError, match=f"^site.env={name}: is set by the script itself"):
            rendered(replace(FREE, env={name: "1"}))


def test_the_arguments_of_srun_are_the_sites_and_bind_a_task_to_its_cores():
    assert srun_arguments(FREE, "torchrun") == "--mpi=none --label "
    assert srun_arguments(FREE, "srun") == "--mpi=none --label --cpu-bind=cores "
    own = replace(FREE, srun=("--cpu-bind=none",))
    assert srun_arguments(own, "srun") == "--cpu-bind=none "


def read_by_bash(words: str, folder: Path, code: str) -> list[str]:
    """The words that srun would get, in that folder and with that frozen code."""
    script = f"set -u; TRILANE_CODE={shlex.quote(code)}; printf '%s\\n' {words}"
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True
    ).stdout.splitlines()


def test_a_container_sees_the_run_folder_the_frozen_code_and_the_sites_mounts(
    tmp_path,
):
    here = tmp_path / "a run"
    here.mkdir()
    image = {"container_image": "/my images/a.sif", "container_mounts": ("/data", "/a:/b:ro")}
    pyxis = srun_arguments(replace(FREE, srun=(), container="pyxis", **image), "torchrun")
    for code, mount in (("", ""), ("/the code", ",/the code:/the code")):
        mounts = f"--container-mounts={here}:{here}{mount},/data:/data,/a:/b:ro"
        workdir = f"--container-workdir={here}"
        assert read_by_bash(pyxis, here, code) == [
            "--container-image=/my images/a.sif",
            mounts,
            workdir,
        ]


def prepared(site: Site, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """What the script does before it activates its environment, in a shell that is no
    login shell.
    """
    text = rendered(site)
    head = text[
        text.index("set -euo pipefail") : text.index("# the environment of this repository")
    ]
    env = {"PATH": os.environ["PATH"], **env}
    script = head + '\necho started ${FROM_SETUP:-} ${QUOTED:-}\neval "${AFTER:-}"'
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True
    )


def test_a_setup_line_that_fails_is_named_and_nothing_is_started(tmp_path):
    setup = ("export FROM_SETUP=1", "exit 3", "touch late")
    done = prepared(replace(FREE, setup=setup), tmp_path)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (3, "", [])
    line = "site mine: setup line 2 ended with exit code 3: exit 3"
    assert done.stderr.splitlines()[-1] == line
