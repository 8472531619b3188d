"""Profiles of the models that clients send: families, graphs, factories.

Everything a client sent is parsed, built and run in children of `sandbox`, never in the server;
routes and jobs are not known here.
"""
