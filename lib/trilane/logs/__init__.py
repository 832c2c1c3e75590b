"""One reader for training logs: text in, a RunLog out."""

from trilane.logs.run import RunLog, read_log, read_run_folder

__all__ = ["RunLog", "read_log", "read_run_folder"]
