"""Measure or estimate what every layer of a model costs.

Nothing here chooses cuts.
"""

if __name__ == "profiler":
    raise ImportError("run 'pip install -e .' and import stagewright.profiler")
