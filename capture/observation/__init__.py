"""Watch an eager run of a model: module calls, mutations, Python state, modes.

Nothing here traces; the model is left as it was found.
"""
