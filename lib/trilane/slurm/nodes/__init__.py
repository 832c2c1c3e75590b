"""The nodes of a job: their test, which of them train, a copy of the environment on each, and failures."""
