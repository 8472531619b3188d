"""Send a running service changed ``.pt2`` archives; exit 1 if one gets anything but 201 or a 4xx.

`fuzzing/archives.py` makes them, equal ones for equal seeds. All are read here first, as the
service's child reads them: what comes out is a graph that reads back, or `InvalidInput`. As many
as asked for are then sent to a server. No answer is a 5xx or later than the child's deadline and
2 s, the server's own process never has more than 600 MiB, and its log has nothing of what was sent.

Every upload is read by a child of its own, which imports pydantic and the reader anew: 0.35 s of a
processor, so that two processors serve four or five a second, whatever the connections. So the
default serves only as many as take ten minutes; `--served 20000` sends all, in 80 minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.fuzzing.archives import MARK, mutants  # noqa: E402
from scripts.hostility.archives import PT2  # noqa: E402
from scripts.hostility.attack import ARCHIVE, Reply, Target  # noqa: E402
from scripts.hostility.server import attacked  # noqa: E402
from scripts.limits import Watched, lateness  # noqa: E402
from stagewright.api.model_sources.graph_limits import check_graph  # noqa: E402
from stagewright.api.model_sources.pt2_upload import LIMITS, MAX_CONCURRENT  # noqa: E402
from stagewright.capture.pt2.graph import read_pt2  # noqa: E402
from stagewright.core.errors import InvalidInput  # noqa: E402
from stagewright.core.graph.graph import Graph  # noqa: E402


@dataclass
class Outcome:
    """What became of the mutants.

    Attributes:
        counts: By what was done, and how it ended.
        slowest_s: The longest that one took, by what was done.
        wrongs: What should not have happened, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)

    def note(self, done: str, how: str, took_s: float) -> None:
        self.counts[f"{done} {how}"] += 1
        self.slowest_s[done] = max(took_s, self.slowest_s.get(done, 0.0))


def main() -> int:
    """0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=20_000, help="read in this process")
    parser.add_argument("--served", type=int, default=2000, help="of those, sent to a server")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    outcome = Outcome()
    read_here(options.seed, options.mutants, outcome)
    print(f"{options.mutants} mutants read, {len(outcome.wrongs)} wrong", flush=True)
    with tempfile.TemporaryDirectory(prefix="stagewright-fuzz-") as name:
        with attacked(Path(name)) as scene:
            send(scene.target, options.seed, options.served, outcome)
            if scene.process.poll() is not None:
                outcome.wrongs.append(f"the server ended with {scene.process.returncode}")
            outcome.wrongs += scene.found()
        check_server(scene.watched, Path(name) / "data/server.log", outcome)
    for what, number in sorted(outcome.counts.items()):
        print(f"{number:6}  {what}")
    for wrong in outcome.wrongs[:50]:
        print(f"WRONG  {wrong}")
    slowest = ", ".join(f"{what} {took_s:.1f} s" for what, took_s in outcome.slowest_s.items())
    print(
        f"{options.mutants} mutants read, {options.served} of them served, seed {options.seed}, in "
        f"{time.monotonic() - begin:.0f} s: {len(outcome.wrongs)} wrong; longest: {slowest}; "
        f"{scene.watched.told()}"
    )
    return int(bool(outcome.wrongs))


def read_here(seed: int, count: int, outcome: Outcome) -> None:
    """Read mutants as the child does."""
    for number, (kind, body) in enumerate(mutants(seed, count)):
        begin = time.monotonic()
        try:
            graph = read_pt2(body)
            check_graph(graph)
            how = "is a graph"
            if Graph.from_json(graph.to_json()) != graph:
                outcome.wrongs.append(f"mutant {number} ({kind}): another graph when read back")
        except InvalidInput:
            how = "is refused"
        except Exception as error:  # noqa: BLE001 - whatever a mutant leads to is to be told
            how = type(error).__name__
            outcome.wrongs.append(f"mutant {number} ({kind}): {how}: {str(error)[:200]}")
        outcome.note("read", f"{kind}: {how}", time.monotonic() - begin)


def send(target: Target, seed: int, count: int, outcome: Outcome) -> None:
    """Send mutants to a server, as many at a time as it reads."""

    def post(body: bytes) -> tuple[Reply, float]:
        begin = time.monotonic()
        reply = target.ask("POST", PT2, body, kind=ARCHIVE)
        return reply, time.monotonic() - begin

    batch = 100
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        made = list(zip(range(count), mutants(seed, count), strict=True))
        for start in range(0, count, batch):
            few = made[start : start + batch]
            replies = pool.map(post, [body for _, (_, body) in few])
            for (number, (kind, _)), (reply, took_s) in zip(few, replies, strict=True):
                outcome.note("served", f"{kind}: {reply.status}", took_s)
                which = f"mutant {number} ({kind})"
                if reply.status != 201 and not 400 <= reply.status < 500:
                    outcome.wrongs.append(f"{which}: {reply.status} {reply.says()[:200]}")
                if late := lateness(which, took_s, LIMITS.deadline_s):
                    outcome.wrongs.append(late)


def check_server(memory: Watched, log: Path, outcome: Outcome) -> None:
    """Note what the server had in memory, and has in its log, that it must not."""
    told = log.read_text()
    outcome.wrongs += memory.wrongs()
    if "Traceback" in told:
        outcome.wrongs.append(f"a traceback in the log: {told[told.index('Traceback') :][:1500]}")
    if MARK in told:
        outcome.wrongs.append(f"the log has what was sent: {told[told.index(MARK) - 200 :][:400]}")


if __name__ == "__main__":
    sys.exit(main())
