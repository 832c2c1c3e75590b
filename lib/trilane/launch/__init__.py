"""Training a plan on this machine: starting the processes, following their log, noticing a hang."""
