"""Profiles of a model's layers, and what can be done with them without a device.

Measuring lives in `stagewright.profiler`.
"""
