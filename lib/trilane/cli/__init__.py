"""The command `trilane`: argument parsing and printing only, one module a command group."""
