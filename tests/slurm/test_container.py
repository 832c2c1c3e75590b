"""The recipes of a container: what they copy exists, and what they run is shell."""

import re
import subprocess

import pytest

from trilane.workspace.installation import checkout


@pytest.mark.parametrize("name", ["Dockerfile", "trilane.def"])
def test_a_recipe_copies_files_that_exist_and_runs_shell(name: str) -> None:
    """Neither docker nor apptainer runs here."""
    root = checkout()
    assert root
    text = (
        (root / "slurm_templates/container" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    )
    if name == "Dockerfile":
        copied = [
            word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()
        ]
        shell = "\n".join(re.findall(r"^RUN (.+)$", text, re.M))
    else:
        files, shell = re.findall(r"%files\n(.+?)\n\n%post\n(.+)", text, re.S)[0]
        copied = [line.split()[0] for line in files.splitlines()]
    assert len(copied) > 5 and not [one for one in copied if not (root / one).exists()]
    assert (
        subprocess.run(["bash", "-n"], input=shell, text=True, check=False).returncode == 0
        and "pip check" in shell
    )
