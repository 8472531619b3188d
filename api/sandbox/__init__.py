"""Child processes confined in memory, time, files and network, and the probes that try to escape.

It knows nothing of models, jobs or HTTP.
"""
