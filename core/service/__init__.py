"""The service's answers as documents, shared by the server and the client.

Requests live in `requests`.
"""
