"""Take the README's picture: the page of GPT-2 XL's plan for four cards of 24 GB.

usage: python scripts/draw_page.py [FILE]

Needs chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

FILE = Path(__file__).parents[1] / "docs" / "images" / "plan-page.png"
STAGEWRIGHT = (sys.executable, "-m", "stagewright.cli")


def draw(file: Path) -> None:
    """Plan as the README does, and photograph the page of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        plan, page = Path(folder) / "plan.json", Path(folder) / "plan.html"
        command = (*STAGEWRIGHT, "plan", "gpt2-xl", "--devices", "4x24GB", "-o", str(plan))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = (*STAGEWRIGHT, "show", str(plan), "--html", str(page))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            view = browser.new_page(viewport={"width": 1280, "height": 800})
            view.goto(page.as_uri())
            view.wait_for_load_state("networkidle")
            view.screenshot(path=file)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
