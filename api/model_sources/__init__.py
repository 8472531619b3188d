"""Turn what a client sent as its model into a profile.

Nothing here knows routes or jobs; a client's code runs only in a child of `sandbox`.
"""
