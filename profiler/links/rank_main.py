"""One rank of a link measurement that `local` started; rank 0 prints JSON, a line a step."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn, TextIO

import torch

from ...core.errors import RankFailed, StagewrightError
from ..machine.memory import keep_freed_memory
from .rank_group import RankGroup, Silent
from .records import LinkOptions
from .session import LinkSession

FAILED = 5
"""As the command line's exit code for something that did not answer."""


def join(options: LinkOptions, on_silence: Silent) -> RankGroup:
    """Join the others as the rank this process was started as.

    Sets threads and allocator of the process, which should be its own.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    return RankGroup(options, on_silence)


def main() -> NoReturn:
    """Measure with the options in the first argument; an error is a line on standard error."""
    options = LinkOptions(**json.loads(sys.argv[1]))
    try:
        with join(options, _give_up) as group:
            report = LinkSession(group, _tell).report()
            if group.rank == 0:
                _say({"report": report.model_dump(mode="json")}, sys.stdout)
    except StagewrightError as error:
        _say(error.to_record().as_dict, sys.stderr)
        _end(FAILED if isinstance(error, RankFailed) else 1)
    _end(0)


def _tell(done: int, total: int, what: str) -> None:
    if os.environ["RANK"] == "0":
        _say({"done": done, "total": total, "what": what}, sys.stdout)


def _give_up(message: str) -> None:
    _say(RankFailed(message).to_record().as_dict, sys.stderr)
    _end(FAILED)


def _say(message: dict[str, object], stream: TextIO) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _end(code: int) -> NoReturn:
    """End at once: a group whose other ranks are gone may hang while it is taken apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
