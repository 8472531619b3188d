"""Replicas of a stage: gradient synchronisation, sharding, clipping and loss scaling.

What happens inside one replica lives in `engine`.
"""
