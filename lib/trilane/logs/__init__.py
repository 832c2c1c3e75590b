"""One reader for training logs: a file in, one RunLog for each run out."""

__all__ = ["RunLog", "read_log", "read_run_folder", "read_runs"]
