"""Exit status 0 if the service at the address given, or at port 8000 here, says it is ready."""

import sys
from urllib.request import ProxyHandler, build_opener

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
try:
    with build_opener(ProxyHandler({})).open(f"{address}/readyz", timeout=3) as response:
        sys.exit(response.status != 200)
except OSError as error:
    sys.exit(f"{address} does not answer: {error}")
