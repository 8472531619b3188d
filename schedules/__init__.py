"""Pipeline schedules: each rank's order of work, warm-up depths and activations held.

Facts about schedules, read alike by `planner` and `runtime`; no times, no tensors.
"""

if __name__ == "schedules":
    raise ImportError("run 'pip install -e .' and import stagewright.schedules")
