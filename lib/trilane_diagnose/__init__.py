"""Diagnosis of hangs, bad restarts and slow nodes from stacks, Flight Recorder dumps, heartbeats
and timings.
"""
