"""``python -m stagewright.api``: the service without the command line's packages."""

from __future__ import annotations

import argparse
import sys

from ..core.errors import InvalidInput, Refused
from .server import serve
from .store.errors import StoreUnavailable


def main() -> int:
    """Serve and return the exit code: 2 for invalid arguments, 4 refused, 5 without a database."""
    parser = argparse.ArgumentParser(
        prog="python -m stagewright.api",
        description="Serve planning over HTTP.",
        epilog="Every setting has a variable (STAGEWRIGHT_...) and a name in the settings file: "
        "docs/service/operations.md.",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="0 takes a free one (8000)")
    parser.add_argument("--database", help="SQLite file, or postgresql://user@host/name")
    parser.add_argument("--config", metavar="FILE", help="settings file, in TOML")
    parser.add_argument("--scheduler", help="embedded, or tls://host:8786 (embedded)")
    arguments = parser.parse_args()
    try:
        serve(**vars(arguments))
    except (InvalidInput, Refused, StoreUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        if isinstance(error, StoreUnavailable):
            return 5
        return 4 if isinstance(error, Refused) else 2
    except KeyboardInterrupt:
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main())
