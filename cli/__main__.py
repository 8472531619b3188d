"""Entry point of ``python -m stagewright.cli``, for when the command is not on the path."""

import sys

from .main import main

sys.exit(main())
