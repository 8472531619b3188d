"""Model families that can be named instead of sent, as data.

Building their modules lives in `profiler.models`.
"""
