"""Ask the public package index what an installation downloads; exit with 1 if docs say otherwise.

usage: python scripts/install_size.py

pip resolves each set of extras with no configuration at all, as on a machine of somebody else, and
installs nothing. What pip finds in a folder of wheels here must not stand in the docs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_TORCH_GB = 0.19
"""Size of torch's CPU build, whose index is asked by nobody here: the wheel of 2.13.0."""


@dataclass(frozen=True)
class Stated:
    """What a page says of the download of extras on Linux, by the build of torch."""

    extras: str
    page: str
    cuda: str
    cpu: str


STATED = (
    Stated("torch,hf", "docs/tutorials/first-plan.md", "2.8 GB", "250 MB"),
    Stated("torch,hf,server", "README.md", "2.9 GB", "0.3 GB"),
    Stated("dev", "README.md", "3.0 GB", "0.5 GB"),
    Stated("dev", "CONTRIBUTING.md", "3.0 GB", "0.5 GB"),
)


def list_wheels(extras: str) -> list[str]:
    """Return the addresses of what pip would download, without any configuration of pip."""
    environment = {name: value for name, value in os.environ.items() if "PIP_" not in name}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
             "--report", str(report), "-c", "constraints.txt", "-e", f".[{extras}]"],
            cwd=ROOT, env={**environment, "PIP_CONFIG_FILE": os.devnull}, check=True,
        )  # fmt: skip
        found = json.loads(report.read_text())["install"]
    urls = [entry["download_info"]["url"] for entry in found]
    return [url for url in urls if url.startswith("https:")]


def read_size(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def is_of_torch(url: str) -> bool:
    return url.rpartition("/")[2].startswith(("torch-", "nvidia", "cuda", "triton"))


def main() -> int:
    wrong = 0
    for extras in dict.fromkeys(each.extras for each in STATED):
        urls = list_wheels(extras)
        with ThreadPoolExecutor(4) as pool:
            sizes = dict(zip(urls, pool.map(read_size, urls), strict=True))
        cuda = sum(sizes.values()) / 1e9
        rest = sum(size for url, size in sizes.items() if not is_of_torch(url)) / 1e9
        cpu = rest + CPU_TORCH_GB
        print(
            f"[{extras}] {len(urls)} packages, {cuda:.2f} GB; with torch's CPU build {cpu:.2f} GB"
        )
        for each in (each for each in STATED if each.extras == extras):
            said = (
                each.cuda == f"{cuda:.1f} GB",
                each.cpu in (f"{cpu:.1f} GB", f"{round(cpu, 2) * 1e3:.0f} MB"),
            )
            wrong += said != (True, True)
            print(f"  {each.page}: {each.cuda}, {each.cpu}: {'right' if all(said) else 'wrong'}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
