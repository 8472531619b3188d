"""Documents as people read them: in a terminal no wider than that, whole for files and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import output_width

if TYPE_CHECKING:
    from ...core.profile.profile import Profile


def profile_text(profile: Profile, *, tree: bool = True, depth: int | None = None) -> str:
    """What ``print(profile)`` shows; see `core.profile_table.profile_table`."""
    width = output_width()
    if width is not None:
        from ...view.terminal_tables import fitted_profile

        return fitted_profile(profile, width, tree=tree, depth=depth)
    from ...core.profile.table import profile_table

    return profile_table(profile, tree=tree, depth=depth)
