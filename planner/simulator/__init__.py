"""Discrete-event simulation of one training step.

It plays given orders of work on given durations and decides nothing.
"""
