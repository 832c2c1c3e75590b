"""`trilane slurm site`: a site of the catalogue or of a file, or one read off the SLURM at hand."""

import json
import sys
from pathlib import Path

import click

from trilane.cli.options import JSON, Command, emit, option, together
from trilane.cli.slurm_options import SITE_TYPE
from trilane.slurm.sites import Site
from trilane.utils.tables import one_line
from trilane.utils.validation import require, to_mapping

NAME = click.argument("site", required=False, type=SITE_TYPE)
PROBE = option("--probe", is_flag=True, help="read the site off sinfo, scontrol and sacctmgr of this machine")
PARTITION = option("--partition", default="", help="with --probe: whose nodes; the default one, or that with most GPUs")
GPU = option("--gpu", default="", help="with --probe: the card, where SLURM does not name it, such as A100-80GB")
OUTPUT = option("--output", type=click.Path(path_type=Path), help="with --probe: write FILE.json and FILE-cluster.json")


@click.command("site", cls=Command)
@together(NAME, PROBE, PARTITION, GPU, OUTPUT, JSON)
def site_command(site: Site | None, probe: bool, partition: str, gpu: str, output: Path | None, as_json: bool) -> None:
    """Print SITE (a name or a JSON file), or the one of this cluster, as JSON; what SLURM does not tell, on stderr."""
    from trilane.slurm import client
    from trilane.slurm import probe as probing

    require(probe != (site is not None), "site", site.name if site else "none", "give either a name or --probe")
    if site is not None:
        emit(True, to_mapping(site), "")
        return
    client.require_answer()
    found = probing.probe(partition, gpu)
    written = found.write(output) if output else []
    values = to_mapping(found.site)
    if as_json:
        values = {"site": values, "unknown": list(found.unknown), "files": [str(file) for file in written]}
    text = "\n".join(map(str, written)) if written else json.dumps(values, indent=2)
    emit(as_json, values, text)
    for line in () if as_json else found.unknown:
        print(f"not found: {one_line(line)}", file=sys.stderr)
