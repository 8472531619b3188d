"""Send a running service everything in a malicious corpus; exit 1 if anything gets through.

The corpus is made by `hostility/`: nothing is fetched, and no file of it is kept. Held against
the server after each attack: nothing of it ran, nothing was written but the database, the answer
is a 4xx that says why (or what the attack says is right), no answer came later than its deadline
and 2 s, and everybody else is still answered; and at the end, the most memory that the server's
own process and its children had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.hostility.attack import Attack, Reply, wrong_with
from scripts.hostility.corpus import corpus
from scripts.hostility.server import CHILD_BYTES, Scene, attacked

OVERSHOOT = 2.0
"""A child may have more than its limit for the moment until somebody looks, and the solver
processes are counted with it, some 420 MiB together."""


def main() -> int:
    """0 if every attack failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--light", action="store_true", help="without those that start children")
    parser.add_argument("--only", help="a group")
    options = parser.parse_args()
    chosen = [
        attack
        for attack in corpus()
        if not (options.light and attack.is_heavy) and options.only in (None, attack.group)
    ]
    wrongs = besieged(chosen)
    for wrong in wrongs:
        print(f"GOT THROUGH  {wrong}")
    print("every attack failed" if not wrongs else f"{len(wrongs)} got through")
    return 1 if wrongs else 0


def besieged(chosen: Sequence[Attack]) -> list[str]:
    """Make attacks on a server, print how they went, and return what got through."""
    with tempfile.TemporaryDirectory(prefix="stagewright-hostile-") as name:
        with attacked(Path(name)) as scene:
            wrongs = [
                f"{attack.group}: {attack.name}: {wrong}"
                for attack in chosen
                if (wrong := tried(scene, attack))
            ]
        log = (Path(name) / "data" / "server.log").read_text()
    wrongs += memory_wrongs(scene)
    if "Traceback" in log:
        wrongs.append(
            f"the server's log has a traceback: ...{log[log.index('Traceback') :][:6000][-1500:]}"
        )
    counts = Counter(attack.group for attack in chosen)
    print(f"{len(chosen)} attacks: {', '.join(f'{n} {group}' for group, n in counts.items())}")
    print(f"memory: {scene.watched.told()} (limit {CHILD_BYTES / 2**20:.0f} MiB each)\n")
    return wrongs


def tried(scene: Scene, attack: Attack) -> str:
    """Make one attack and print how it went; what is wrong, or nothing."""
    begin = time.monotonic()
    reply = attack.send(scene.target)
    took_s = time.monotonic() - begin
    wrong = wrong_with(attack, reply) or left_wrong(scene)
    _print(attack, reply, took_s, wrong)
    return wrong


def left_wrong(scene: Scene) -> str:
    """Return what an attack did to the server or around it; empty if nothing."""
    if scene.process.poll() is not None:
        return f"the server ended with {scene.process.returncode}"
    if late := scene.target.late:
        told = "; ".join(late)
        late.clear()
        return told
    traces = scene.found()
    if traces:
        return f"left {', '.join(traces)}"
    alive = scene.target.ask("GET", "/healthz", timeout_s=5)
    return "" if alive.status == 200 else f"afterwards /healthz answers {alive.status}"


def memory_wrongs(scene: Scene) -> list[str]:
    """Return what had more memory than it may."""
    wrongs = scene.watched.wrongs()
    if scene.watched.children_bytes > OVERSHOOT * CHILD_BYTES:
        wrongs.append(f"memory: children had {scene.watched.children_bytes} bytes")
    return wrongs


def _print(attack: Attack, reply: Reply, took_s: float, wrong: str) -> None:
    said = wrong or reply.says()
    mark = "!!" if wrong else "  "
    name = attack.name.encode("ascii", "backslashreplace").decode()
    said = said.encode("ascii", "backslashreplace").decode()
    print(
        f"{mark} {attack.group:<9}{name[:42]:<43}{reply.status or 'closed':>6}"
        f"{1000 * took_s:7.0f} ms  {said[:80]}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
