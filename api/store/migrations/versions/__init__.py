"""Schema migrations of the store, one module per revision; alembic reads them."""
