"""Certificates for a scheduler somewhere else."""

from __future__ import annotations

from pydantic import Field

from ...core.document import Record


class TlsFiles(Record):
    """What a scheduler, its workers and its servers show each other."""

    ca_file: str = Field(min_length=1, description="The authority that signed all certificates.")
    cert: str = Field(min_length=1, description="This end's certificate.")
    key: str | None = Field(None, description="Its private key, unless the same file has it.")
