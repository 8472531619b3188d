"""Preconditions: ``If-Match`` and ``If-None-Match`` (RFC 9110, section 13)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from starlette.datastructures import Headers

from ..store.documents import CheckTag
from .problems import Problem

_TAG = re.compile(r'(?:W/)?"[^"]*"')

IfMatch = Annotated[
    str | None,
    Header(description="Entity tags, or `*`: if none is the current one, the response is 412."),
]
IfNoneMatch = Annotated[
    str | None,
    Header(description="Entity tags the client has; if one still matches, the response is 304."),
]
CHANGED: dict[int | str, dict[str, Any]] = {
    412: {"description": "It has changed since the client read it (If-Match)"}
}
"""For the ``responses`` of routes that change or delete what has an entity tag."""


def has_current(headers: Headers, tag: str) -> bool:
    """Return True if a reader's copy, of one of the tags in ``If-None-Match``, is current."""
    # Weak tags match too (section 13.1.2): compression makes tags weak.
    sent = {entry.removeprefix("W/") for entry in _tags(headers, "if-none-match")}
    return bool({f'"{tag}"', "*"} & sent)


def check_match(headers: Headers, tag: str | None) -> None:
    """Raise `Problem` 412 if there is an ``If-Match`` without the current tag, if there is one."""
    # Weak tags match nothing here (section 13.1.1).
    if "if-match" in headers and not {f'"{tag}"', "*"} & _tags(headers, "if-match"):
        raise Problem(
            412,
            "precondition-failed",
            "What is stored has another entity tag than If-Match names: it has changed since. Read "
            "it again, with 'Accept-Encoding: identity' if the tag begins with W/.",
        )


def _tags(headers: Headers, name: str) -> set[str]:
    sent = ",".join(headers.getlist(name))
    return {"*"} if sent.strip() == "*" else set(_TAG.findall(sent))


async def _precondition(
    request: Request, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> CheckTag:
    def check(tag: str) -> None:
        check_match(request.headers, tag)
        if has_current(request.headers, tag):
            raise Problem(
                412,
                "precondition-failed",
                "What is stored has an entity tag that If-None-Match names.",
            )

    return check


Precondition = Annotated[CheckTag, Depends(_precondition)]
