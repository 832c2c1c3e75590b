"""The linter of hand-written tables: a file in, its contradictions out."""

from trilane.lint.door import Report, add_arguments, lint, run
from trilane.lint.finding import Finding

__all__ = ["Finding", "Report", "add_arguments", "lint", "run"]
