"""Files on disk: studies, run folders, checkpoints, fingerprints, heartbeats, status. The
torch-free protocol that the engine, the launcher and the readers share.
"""
