"""The four engines, one module each, with their shared parts and the access to their weights and
optimizer states.
"""
