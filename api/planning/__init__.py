"""Planning as a service: requests, their limits and cache keys, and the pool of solver processes.

The algorithms live in `stagewright.planner`, HTTP in `routes` and `http`.
"""
