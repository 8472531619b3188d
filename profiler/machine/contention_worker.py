"""The work of one busy neighbour: transformer-like matrix products over fresh memory.

Ends by itself when its parent goes away, so that a killed measurement leaves nothing running.
"""

from __future__ import annotations

import os
import sys

import torch


def main() -> None:
    """Announce readiness on standard output, then work until the parent is gone."""
    torch.set_num_threads(1)
    parent = os.getppid()
    weight = torch.randn(768, 3072)
    back = torch.randn(3072, 768)
    x = torch.randn(256, 768)
    announced = False
    while os.getppid() == parent:
        for _ in range(8):
            y = torch.nn.functional.gelu(x @ weight)
            x = torch.nn.functional.layer_norm(y @ back, (768,))
        if not announced:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            announced = True


if __name__ == "__main__":
    main()
