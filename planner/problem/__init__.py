"""The planning problem: what was asked, checked and put into numbers.

Nothing here computes a cost or a plan.
"""
