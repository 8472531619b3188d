"""Commands that reproduce a plan."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from ..core.cluster.cluster import Cluster
from ..core.plan.plan import Plan, PlanOptions
from ..core.text_table import sanitize
from .option_flags import flags_of
from .plan_view import Reproduce


def reproduce(plan: Plan, cluster: Cluster | None) -> Reproduce:
    """Return the commands that make this plan from its profile again.

    Files are named as the commands write them; ``cluster.json`` is written from the page.
    """
    return ask_again(plan.profile_id, cluster, plan.options)


def ask_again(profile_id: str, cluster: Cluster | None, asked: PlanOptions) -> Reproduce:
    """Return the commands that repeat a request, whether it was answered with a plan or not."""
    options = changed(asked)
    where = "cluster.json" if cluster is None else shorthand(cluster) or "cluster.json"
    body: dict[str, Any] = {"profile_id": profile_id}
    if cluster is not None:
        body["cluster"] = shorthand(cluster) or cluster.model_dump(mode="json")
    else:
        body["cluster"] = "..."
    if options:
        body["options"] = options
    keywords = "".join(f", {name}={value!r}" for name, value in options.items())
    planned = ["stagewright", "plan", "profile.json"]
    quoted = f'"{where}"' if where != "cluster.json" else 'Cluster.read("cluster.json")'
    return Reproduce(
        shell=" ".join(
            map(_quoted, [*planned, "--devices", where, *flags_of(asked), "-o", "plan.json"])
        ),
        curl='curl -H "Authorization: Bearer $STAGEWRIGHT_TOKEN" '
        "-H 'Content-Type: application/json' \\\n  -d "
        f'{shlex.quote(json.dumps(body))} \\\n  "$URL/v1/plans"',
        python="from stagewright import Cluster, PlanOptions, Profile, plan\n\n"
        'profile = Profile.read("profile.json")\n'
        f"options = PlanOptions({keywords.removeprefix(', ')})\n"
        f"print(plan(profile, {quoted}, options))",
    )


def _quoted(word: str) -> str:
    """Quote a word for bash, unprintable characters as visible escapes."""
    if word.isprintable():
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = re.sub(r"[\x80-\xff]", _four_digits, plain)
    return f"$'{sanitize(escaped)}'"


def _four_digits(found: re.Match[str]) -> str:
    """Two digits are a byte for bash, which is the character only below U+0080."""
    character = found[0]
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def changed(options: PlanOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, as JSON values."""
    usual = PlanOptions().model_dump(mode="json")
    return {
        name: value
        for name, value in options.model_dump(mode="json").items()
        if name not in usual or value != usual[name]
    }


def shorthand(cluster: Cluster) -> str | None:
    """``4x24GB`` for a cluster that is just what this stands for; `None` for any other."""
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    if len(kinds) != 1:
        return None
    text = f"{len(cluster.devices)}x{kinds[0]}"
    try:
        return text if Cluster.parse(text) == cluster else None
    except ValueError:
        return None
