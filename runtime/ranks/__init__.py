"""Ranks and process groups: membership, collectives and failure detection.

Nothing here knows models or plans.
"""
