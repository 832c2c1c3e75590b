"""The linter of tables that people typed: a file in, its contradictions out."""

from trilane.documents.lint.finding import LintFinding
from trilane.documents.lint.lint import Report, lint

__all__ = ["LintFinding", "Report", "lint"]
