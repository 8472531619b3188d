"""``python -m stagewright.cli``, where the installed command is not on the path."""

import sys

from .main import main

sys.exit(main())
