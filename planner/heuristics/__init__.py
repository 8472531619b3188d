"""Published balancing rules and baselines that plans are compared with.

Nothing here proves a bound.
"""
