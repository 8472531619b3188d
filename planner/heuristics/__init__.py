"""Published balancing rules, baselines and candidate plans, all found without a search.

Nothing here proves a bound, and nothing decides which plan wins.
"""
