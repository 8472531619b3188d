"""Planning as a service: requests, caching, admission and the pool of solver processes.

The algorithms live in `stagewright.planner`; HTTP lives in `routes` and `http`.
"""
