"""Command-line flags shared by several commands, and the functions that parse their values.

Nothing here runs a command or writes output.
"""
