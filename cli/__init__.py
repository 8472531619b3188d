"""The ``stagewright`` command line, one file a command.

Commands parse, call a function that users could call themselves, and print; they decide nothing.
"""

if __name__ == "cli":
    raise ImportError("run 'pip install -e .' and import stagewright.cli")
