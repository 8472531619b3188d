"""Planning over branches: downsets of the layer graph and orders of its layers.

Chains need nothing from here.
"""
