"""Read one exported program in a process of its own: its JSON in, a graph out.

On failure the last line of standard error is JSON as `profiler.child` writes it.
"""

from __future__ import annotations

import json
import sys

from ...core.errors import InvalidInput
from .graph_limits import check_graph
from .pt2_graph import read_program


def main() -> int:
    """Exit code 0 with the graph on standard output, 1 with an error on standard error."""
    try:
        graph = read_program(sys.stdin.buffer.read())
        check_graph(graph)
    except InvalidInput as error:
        told = {"error": "InvalidInput", "message": str(error), "field": error.field}
        sys.stderr.write(json.dumps(told) + "\n")
        return 1
    sys.stdout.write(graph.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
