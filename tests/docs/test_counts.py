"""Pages that count are right: before a list as many as it has, and of the code's own as many.

Capturing had "five ways" above a table of six, and pages spoke of eight schedules and of nine.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from stagewright.cli.main import COMMANDS
from stagewright.core.plan.schedule import TrainingSchedule
from stagewright.formats.target_tables import TARGET_NAMES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    page for page in (ROOT / "docs").rglob("*.md") if "build" not in page.parts
)

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS += ("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")
NUMBER = rf"\b({'|'.join(WORDS[2:])}|[2-9]|[1-9]\d)"
LISTED = (
    "ways|terms|kinds|steps|rules|forms|parts|commands|tokens|routes|recipes|targets|objectives|"
    "reasons|settings|states|schedules|groups|things"
)
"""Nouns that pages count above a list of them."""

SOME = 5
"""The most of what there is that a page may speak of without speaking of all."""

TRAINING = len(get_args(TrainingSchedule))
COUNTED = {
    "schedules": {TRAINING, TRAINING + 1},  # the other one is of inference
    "middlewares": {len(re.findall(r"^ +Middleware\(", (ROOT / "api/app.py").read_text(), re.M))},
    "targets": {len(TARGET_NAMES)},
    "commands of the command line": {len(COMMANDS)},
}
"""Nouns whose number is the code's."""


def to_number(word):
    return WORDS.index(word.lower()) if word.lower() in WORDS else int(word)


def count_rows(block):
    """The entries of a list, or the rows of a table; `None` of other text."""
    lines = block.splitlines()
    if lines[0].startswith("|"):
        return len(lines) - 2
    entries = [line for line in lines if re.match(r"(?:[-*]|\d+\.) ", line)]
    return len(entries) if lines[0] in entries else None


def list_miscounts(text):
    """The sentences in front of a list that count otherwise than it has entries."""
    blocks = re.split(r"\n{2,}", re.sub(r"(?s)```.*?```|<!--.*?-->", "", text).strip())
    for before, block in pairwise(blocks):
        rows = count_rows(block)
        counts = re.search(rf"(?i){NUMBER} (?:\w+ )?({LISTED})\b", before)
        announces = before.endswith(":") or before.startswith("#")
        if rows and counts and announces and to_number(counts[1]) != rows:
            yield f"{counts[0]}, but {rows} follow: {before[-80:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_counts_what_it_lists(page):
    assert list(list_miscounts(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_counts_as_the_code_does(page):
    text = page.read_text()
    for noun, right in COUNTED.items():
        said = {to_number(word) for word in re.findall(rf"(?i){NUMBER} {noun}\b", text)}
        said = {number for number in said if number > SOME}
        assert said <= right, f"{page.name} counts {said} {noun}, there are {right}"


def test_pages_that_count_schedules_say_which():
    assert f"| schedules | {TRAINING} of training, 1 of inference |" in PAGES[0].read_text()
    for page in ("docs/guides/from-torch-pipelining.md", "docs/evidence/conformance.md"):
        text = (ROOT / page).read_text()
        assert re.search(rf"{WORDS[TRAINING + 1]} schedules \({WORDS[TRAINING]} of training", text)


@pytest.mark.parametrize(
    "text",
    [
        "Five ways are tried:\n\n| way | what |\n|---|---|\n| a | b |\n| c | d |",
        "There are 3 more rules:\n\n- a\n- b",
        "## Ten terms\n\n1. a\n2. b",
    ],
)
def test_a_miscount_is_found(text):
    assert list(list_miscounts(text))
