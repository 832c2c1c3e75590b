"""Training a plan on this machine: start the processes, follow their logs, detect a hang."""
