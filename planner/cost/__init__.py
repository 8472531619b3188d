"""The cost model: step time and memory of stages, links and whole plans.

Nothing here searches.
"""
