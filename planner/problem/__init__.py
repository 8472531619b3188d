"""The planning problem: a request, checked, with its constraints as positions and stages.

Nothing here computes a cost or chooses a plan.
"""
