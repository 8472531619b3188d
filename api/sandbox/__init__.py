"""Child processes confined in memory, time, files and network.

It knows nothing of models, jobs or HTTP.
"""
