"""Cut a captured model into stage modules and route the tensors between them.

Nothing here runs a stage.
"""
