"""The command line, on click: one module a group of commands. It parses arguments and prints; all else is below."""
