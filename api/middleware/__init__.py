"""ASGI middleware around every route, each with one duty.

What depends on the caller's identity lives in `auth`.
"""
