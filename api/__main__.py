"""``python -m stagewright.api``: the service without the command line's packages."""

from __future__ import annotations

import argparse
import os
import sys

from ..core.errors import InvalidInput, Refused
from .serve import TOKEN_VARIABLE, serve
from .settings import DATABASE_VARIABLE
from .store.errors import StoreUnavailable


def main() -> int:
    """Serve; 2 if the arguments do not fit, 4 if they are refused, 5 without its database."""
    parser = argparse.ArgumentParser(
        prog="python -m stagewright.api",
        description="Serve planning over HTTP.",
        epilog=f"The token comes from {TOKEN_VARIABLE}; on a loopback address one is made up.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--database",
        default=os.environ.get(DATABASE_VARIABLE, "stagewright.db"),
        help=f"SQLite file, or postgresql://user@host/name (also {DATABASE_VARIABLE})",
    )
    arguments = parser.parse_args()
    try:
        serve(host=arguments.host, port=arguments.port, database=arguments.database)
    except (InvalidInput, Refused, StoreUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        if isinstance(error, StoreUnavailable):
            return 5
        return 4 if isinstance(error, Refused) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
