"""ASGI middleware around every route; what depends on the principal lives in `auth`."""
