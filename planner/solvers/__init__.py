"""Solvers: one file for each way to answer an objective, and the registry `solve`.

Formulas live in `cost`, the exact search in `search`.
"""
