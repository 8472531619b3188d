"""Solvers of objectives, their registry (`solve`), and the local searches that they share.

Formulas belong to `cost`, the exact search to `search`.
"""
