"""The captured graph cut into layers: boundaries, mutations, constants and legal cuts.

Nothing here runs the model.
"""
