"""Run a plan: train, serve and checkpoint a model in its stages.

It never changes a plan; what it cannot run it refuses by name.
"""

if __name__ == "runtime":
    raise ImportError("run 'pip install -e .' and import stagewright.runtime")
