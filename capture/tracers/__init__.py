"""Tracers that turn a module into a graph, from the finest to one opaque layer.

Whether a graph equals its model is judged in `equivalence`.
"""
