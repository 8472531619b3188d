"""Defects of torch that the profiler and the runtime both have to work around."""

NEEDS_INPUT_GRADIENT = frozenset({"NativeGroupNormBackward0"})
"""Names of autograd nodes whose weights' gradients are asked for only together with their input's.
torch 2.11 to 2.13 end the process with a segmentation fault on the CPU where group norm of a
channels-last input computes the former alone."""
