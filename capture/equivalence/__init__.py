"""Checks that a captured graph computes what the model computes.

Nothing here traces or changes a graph.
"""
