"""The findings of a restart as text."""

from trilane.diagnose.restart.compare import RestartComparison

as_text = RestartComparison.to_text
