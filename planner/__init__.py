"""Choose stages, cuts, devices and recomputation for a profile on a cluster, with a proof.

Numbers in, plan out: no torch, no measuring, no HTTP.
"""

if __name__ == "planner":
    raise ImportError("run 'pip install -e .' and import stagewright.planner")
