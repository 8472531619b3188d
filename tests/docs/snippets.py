"""Run the snippets of one document, in order and in the current folder; or count those of many.

usage: python -m tests.docs.snippets DOCUMENT
       python -m tests.docs.snippets --count DOCUMENT ...

Python blocks share one namespace; a block of ``py`` is written to the file that its first line
names. Of a console block every line after a ``$`` is run by bash, of a
block of sh the whole. What readers need not see is in
``<!-- invisible-code-block: python`` comments; ``<!-- skip: next "REASON" -->`` leaves a block out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

FENCE = re.compile(r"^ *(?:> )?```(?:python|py|console|sh)$", re.MULTILINE)
SKIPPED = re.compile(r'^ *<!-- skip: next "(.+)" -->$', re.MULTILINE)


def read_document(path: Path) -> Document:
    """Return a document with its examples, hidden ones and skips included."""
    parsers = [
        PythonCodeBlockParser(),
        CodeBlockParser("py", _write_file),
        CodeBlockParser("console", _run_console),
        CodeBlockParser("sh", _run_script),
        SkipParser(),
    ]
    return Sybil(parsers=parsers, path=str(path.parent)).parse(path)


def list_commands(block: str) -> Iterator[str]:
    """Yield the commands of a console block, continued lines joined, without what they print."""
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                command += "\n" + next(lines)
            yield command


def _write_file(example: Example) -> None:
    name = example.parsed.partition("\n")[0].removeprefix("# ")
    Path(name).write_text(example.parsed)


def _run_console(example: Example) -> None:
    _run_bash("\n".join(list_commands(example.parsed)))


def _run_script(example: Example) -> None:
    _run_bash(example.parsed)


def _run_bash(script: str) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{script}\nended with {done.returncode}:\n{done.stdout[-4000:]}")


def main(arguments: Sequence[str]) -> None:
    """Run the examples of the document that the arguments name, or count."""
    if arguments[0] == "--count":
        texts = [Path(name).read_text(encoding="utf-8") for name in arguments[1:]]
        snippets = sum(len(FENCE.findall(text)) for text in texts)
        skipped = sum(len(SKIPPED.findall(text)) for text in texts)
        print(f"{snippets} snippets, {snippets - skipped} of them run, {skipped} left out")
        return
    document = read_document(Path(arguments[0]))
    for example in document.examples():
        print(f"line {example.line}", file=sys.stderr, flush=True)
        with suppress(SkipTest):
            example.evaluate()


if __name__ == "__main__":
    main(sys.argv[1:])
