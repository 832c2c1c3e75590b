"""SLURM: sites, job scripts, pre-flight checks, submission, status, sweeps and chains of jobs."""
