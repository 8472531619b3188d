"""Jobs: queued in the store, run by workers and followed by the server.

Routes and pages are not known here; how a model is measured is the business of `model_sources`.
"""
