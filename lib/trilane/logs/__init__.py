"""One reader for training logs: a file in, one RunLog for each run out."""

from trilane.logs.run import RunLog, read_log, read_run_folder, read_runs

__all__ = ["RunLog", "read_log", "read_run_folder", "read_runs"]
