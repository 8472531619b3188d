"""Former name of `worker`, kept for one release: ``estimate_command`` settings spell it."""

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main())
