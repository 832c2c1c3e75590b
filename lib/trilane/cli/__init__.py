"""The command line, on click: one module a group of commands, which parse arguments and print what
others compute.
"""
