"""Former name of `measure_worker`, kept for one release: ``measure_command`` settings spell it."""

import sys

from .measure_worker import main

if __name__ == "__main__":
    sys.exit(main())
