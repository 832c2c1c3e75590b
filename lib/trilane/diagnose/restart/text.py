"""The findings of a restart as text."""

from trilane.diagnose.restart.compare import Audit
from trilane.diagnose.restart.finding import KINDS, RestartFinding

SHOWN = 6  # findings of one kind


def as_text(found: Audit) -> str:
    """The audit for a person: what was compared, the findings kind by kind, the notes."""
    lines = [f"compared {line}" for line in found.compared]
    kinds: dict[str, list[RestartFinding]] = {}
    for finding in found.findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, findings in kinds.items():
        lines += ["", f"{KINDS[kind]} ({len(findings)}):"]
        findings = sorted(findings, key=lambda finding: -(finding.size or 0))
        lines += [f"  {finding.line()}" for finding in findings[:SHOWN]]
        lines += [f"  ... and {len(findings) - SHOWN} more; --json has them all"] if len(findings) > SHOWN else []
    lines += ["", *(f"note: {note}" for note in found.notes)] if found.notes else []
    return "\n".join([*lines, "", f"{len(found.findings)} findings" if found.findings else "nothing is wrong"])
