"""Captured graphs as documents without code, and the operations these may hold.

Rebuilding a graph from a document lives in `profiler.graphs`.
"""
