"""Write the table of settings in docs/service/operations.md again, from the settings there are."""

from __future__ import annotations

import sys
from pathlib import Path

from stagewright.api.settings.names import SettingName, setting_names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "service" / "operations.md"
HEAD = "| setting | default | meaning |\n|---|---|---|\n"


def table() -> str:
    """Return a row for each setting."""
    rows = [f"| `{one.name}` | {_default(one)} | {one.help} |" for one in setting_names()]
    return HEAD + "\n".join(rows) + "\n"


def _default(setting: SettingName) -> str:
    value = setting.shown(setting.default)
    if value is None or sys.executable in (value if isinstance(value, list) else ()):
        return ""
    return f"`{','.join(value) if isinstance(value, list) else str(value).lower()}`"


def written(page: str) -> str:
    """Return the page with this release's table."""
    before, _, rest = page.partition(HEAD)
    after = rest[rest.index("\n\n") :]
    return before + table().rstrip("\n") + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
