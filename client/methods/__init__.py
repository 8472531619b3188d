"""The client's methods as generators of steps, each written once for both clients.

No module here performs I/O. Reading by an id that the service does not know raises `NotFound`.
"""
