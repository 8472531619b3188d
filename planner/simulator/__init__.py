"""Discrete-event simulation of one training step.

It executes given action orders on given durations and decides nothing.
"""
