"""`python -m trilane restart A B`: what was saved against what a restart made of it; who is to blame for a spike."""

import argparse
import json
from pathlib import Path

from trilane.diagnose.finding import KINDS, Finding
from trilane.diagnose.restart import Audit, audit

SHOWN = 6  # findings of one kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane restart`."""
    what = "a run folder, a checkpoint, or a folder of fingerprints"
    parser.add_argument("before", type=Path, metavar="A", help=f"what was saved: {what}")
    parser.add_argument("after", type=Path, metavar="B", help=f"what came of it: {what}")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print what is wrong; 0 where nothing is, 1 where something is."""
    found = audit(args.before, args.after)
    print(json.dumps(found.to_json(), indent=1) if args.json else as_text(found))
    return 1 if found.findings else 0


def as_text(found: Audit) -> str:
    """The audit for a person: what was compared, the findings kind by kind, the notes."""
    lines = [f"compared {line}" for line in found.compared]
    kinds: dict[str, list[Finding]] = {}
    for finding in found.findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, findings in kinds.items():
        lines += ["", f"{KINDS[kind]} ({len(findings)}):"]
        findings = sorted(findings, key=lambda finding: -(finding.size or 0))
        lines += [f"  {finding.line()}" for finding in findings[:SHOWN]]
        lines += [f"  ... and {len(findings) - SHOWN} more; --json has them all"] if len(findings) > SHOWN else []
    lines += ["", *(f"note: {note}" for note in found.notes)] if found.notes else []
    return "\n".join([*lines, "", f"{len(found.findings)} findings" if found.findings else "nothing is wrong"])
