"""Child process that reads a ``.pt2`` archive on standard input and writes its graph.

On failure, the last line of standard error is the error, as `profiler.worker_protocol` says.
"""

from __future__ import annotations

import sys

from ...capture.pt2.graph import read_pt2
from ...core.errors import InvalidInput
from ...profiler.worker_protocol import tell_error
from .graph_limits import check_graph


def main() -> int:
    """Return exit code 0 with a graph on standard output, or 1 with an error on standard error."""
    try:
        graph = read_pt2(sys.stdin.buffer.read())
        check_graph(graph)
    except InvalidInput as error:
        tell_error(error)
        return 1
    sys.stdout.write(graph.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
