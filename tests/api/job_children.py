"""Stand-ins for the measuring child: small programs that do what one may."""

from __future__ import annotations

import json
from typing import Any

START = "import json, os, sys, time; request = sys.stdin.read()\n"


def measuring(profile: dict[str, Any], seconds: float = 0.0, layers: int = 3) -> str:
    """Tells its progress and writes a profile."""
    return START + (
        f"for done in range({layers}):\n"
        "    line = {'done': done, 'total': "
        f"{layers}, 'layer': f'blocks.{{done}}'}}\n"
        "    sys.stderr.write(json.dumps(line) + '\\n'); sys.stderr.flush()\n"
        f"    time.sleep({seconds / layers!r})\n"
        f"sys.stdout.write({json.dumps(profile)!r})"
    )


def sleeping(file: str = "") -> str:
    """Says at which layer it is, writes down its process, and does not end."""
    noted = f"open({file!r}, 'w').write(str(os.getpid()))\n" if file else ""
    return START + (
        'sys.stderr.write(\'{"done": 1, "total": 9, "layer": "blocks.1"}\\n\')\n'
        "sys.stderr.flush()\n" + noted + "time.sleep(600)"
    )


def failing(error: str, message: str, **further: object) -> str:
    """Announces an error, and fails."""
    line = json.dumps({"kinds": [error], "message": message, "details": further})
    return START + f"sys.stderr.write({line!r} + '\\n'); sys.exit(1)"
