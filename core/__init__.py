"""The documents that cross borders: graphs, profiles, clusters, plans, requests and errors.

Frozen and validated; no torch, no numpy, no algorithm that searches.
"""

if __name__ == "core":
    raise ImportError("run 'pip install -e .' and import stagewright.core")
