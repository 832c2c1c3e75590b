"""Alerts about runs that nobody watches: what they say, and their delivery, each once."""
