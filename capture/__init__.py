"""Capture any module as a graph of layers and check that it equals the module.

Nothing here measures time or chooses cuts.
"""

if __name__ == "capture":
    raise ImportError("run 'pip install -e .' and import stagewright.capture")
