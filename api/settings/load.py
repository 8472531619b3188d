"""Sources of the settings: flags before variables before the file before defaults.

pydantic-settings reads the variables and the file. Its own merge is not used because it forgets
which source a value came from, which error messages and ``stagewright config show`` name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ...core.errors import InvalidInput
from ...core.validation_words import describe_violation
from .names import SettingName, setting_names, suggest_setting
from .settings import PREFIX, ServerSettings

CONFIG_VARIABLE = PREFIX + "CONFIG"
"""The variable that names the file, like ``--config``."""

OTHER_VARIABLES = frozenset(
    PREFIX + name for name in ("CONFIG", "DEBUG", "NUMBA", "SERVER", "RETRIES", "TIMEOUT_S")
)
"""Variables with our prefix that are not settings of the server."""

KUBERNETES = re.compile(PREFIX + r"(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+|PORT)")
"""Variables that Kubernetes sets in every container beside a service named ``stagewright``."""


class _Sources(ServerSettings, BaseSettings):
    """The settings as pydantic-settings wants them, to read variables and files."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        enable_decoding=False,  # lists are comma-separated, not JSON
    )


@dataclass(frozen=True)
class Origin:
    """Source of a value: its kind, and the file, variable or flag."""

    kind: Literal["default", "file", "environment", "flag"]
    place: str | None = None


@dataclass(frozen=True)
class Configuration:
    """Settings with the origin of each.

    Attributes:
        settings: The values, secrets read from their files.
        origins: By the setting's name.
        troubles: By the setting's name, the reason that a secret could not be read.
    """

    settings: ServerSettings
    origins: Mapping[str, Origin]
    troubles: Mapping[str, str] = field(default_factory=dict)

    def value(self, setting: SettingName) -> Any:
        """Return the value of a setting; in a missing section, its default."""
        found: Any = self.settings
        for name in setting.path:
            found = getattr(found, name)
            if found is None:
                return setting.default
        return found


def configure(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | Path | None = None,
    strict: bool = True,
) -> Configuration:
    """Return the settings of a server started in this environment.

    Args:
        flags: Values from the command line by field name; `None` means that a flag was not given.
        file: TOML file; by default the one that ``STAGEWRIGHT_CONFIG`` names.
        strict: If true, an unreadable secret is an error; else it is listed in ``troubles``.

    Raises:
        InvalidInput: A name is unknown, a value is invalid, or a file cannot be read.
    """
    chosen = file if file is not None else os.environ.get(CONFIG_VARIABLE)
    known = {setting.path: setting for setting in setting_names()}
    # In ascending order of precedence: each source replaces what the ones before it gave.
    found: dict[tuple[str, ...], tuple[Any, Origin]] = {}
    if chosen is not None:
        in_file = _leaves(_read_toml(Path(chosen)))
        _check_names(in_file, known, f"{chosen}: ")
        found |= {path: (value, Origin("file", str(chosen))) for path, value in in_file.items()}
    _check_variables(known)
    for path, value in _leaves(EnvSettingsSource(_Sources)()).items():
        found[path] = (value, Origin("environment", known[path].variable))
    for name, value in (flags or {}).items():
        if value is not None:
            found[(name,)] = (value, Origin("flag", "--" + name.replace("_", "-")))
    # Checked once, merged: a section may be spread over the file and variables.
    settings = _validate(found, known)
    origins = {
        setting.name: found[path][1] if path in found else Origin("default")
        for path, setting in known.items()
    }
    return _with_secrets(settings, origins, strict=strict)


def _read_toml(path: Path) -> dict[str, Any]:
    """Return the values in a TOML file."""
    if not path.is_file():
        raise InvalidInput(f"Settings file {path} does not exist. Name one with --config.")
    try:
        return TomlConfigSettingsSource(_Sources, toml_file=path)()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        what = "is not TOML" if isinstance(error, tomllib.TOMLDecodeError) else "cannot be read"
        raise InvalidInput(f"Settings file {path} {what}: {why}") from None


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return nested values by their path."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(_leaves(value, (*path, name)))
        else:
            found[(*path, name)] = value
    return found


def _check_names(
    given: Iterable[tuple[str, ...]], known: Mapping[tuple[str, ...], SettingName], where: str
) -> None:
    """Refuse unknown names in a file, all of them at once."""
    names = [setting.name for setting in known.values()]
    unknown = [".".join(path) for path in given if path not in known]
    if unknown:
        raise InvalidInput(where + "\n".join(_unknown(name, names) for name in unknown))


def _unknown(name: str, names: Sequence[str]) -> str:
    return f"{name} is not a setting; {suggest_setting(name, names)}"


def _check_variables(known: Mapping[tuple[str, ...], SettingName]) -> None:
    """Refuse unknown variables with our prefix, all of them at once."""
    names = {setting.variable for setting in known.values()} | OTHER_VARIABLES
    ours = {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIX)}
    for name, value in ours.items():
        # STAGEWRIGHT_PORT is a setting, too; Kubernetes gives it an address, tcp://10.0.0.1:8000.
        if KUBERNETES.fullmatch(name) and (name not in names or "://" in value):
            raise InvalidInput(
                f"{name} is not a setting: Kubernetes set it for a service named stagewright. Set "
                "'enableServiceLinks: false' in the pod's spec."
            )
    if unknown := sorted(ours.keys() - names):
        raise InvalidInput("\n".join(_unknown(name, sorted(names)) for name in unknown))


def _validate(
    found: Mapping[tuple[str, ...], tuple[Any, Origin]],
    known: Mapping[tuple[str, ...], SettingName],
) -> ServerSettings:
    values: dict[str, Any] = {}
    for path, (value, _) in found.items():
        place = values
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    try:
        return ServerSettings.model_validate(values)
    except ValidationError as error:
        # One error at a time, without the input: that may be a secret, which a log would keep.
        first = error.errors(include_input=False, include_url=False)[0]
    path = tuple(str(part) for part in first["loc"])
    # The location may end inside a value, e.g. at an item of a list.
    while path and path not in known:
        path = path[:-1]
    if first["type"] == "missing":
        beside = min(_named(given, found[given][1]) for given in found if given[:1] == path[:1])
        raise InvalidInput(f"{known[path].variable} is missing beside {beside}") from None
    message = describe_violation(first)
    if first["type"] in ("string_too_short", "too_short"):
        message = "is empty"
    name = _named(path, found[path][1]) if path in found else ".".join(path)
    raise InvalidInput(f"{name}: {message[:1].lower()}{message[1:]}") from None


def _named(path: tuple[str, ...], origin: Origin) -> str:
    """Return the name of a setting in its source: a field, a variable or a flag."""
    name = ".".join(path)
    return f"{name} in {origin.place}" if origin.kind == "file" else origin.place or name


def _with_secrets(
    settings: ServerSettings, origins: Mapping[str, Origin], *, strict: bool
) -> Configuration:
    """Return the settings with secrets read from their files."""
    changed: dict[str, str | None] = {}
    changed_origins, troubles = dict(origins), dict[str, str]()
    for name, path in (  # read after validation: the files may be named by any source
        ("token", settings.token_file),
        ("session_key", settings.session_key_file),
    ):
        try:
            if path is not None and _takes_precedence(f"{name}_file", name, origins):
                changed_origins[name] = Origin("file", str(path))
                changed[name] = None
                changed[name] = read_secret(path)
        except InvalidInput as error:
            troubles[f"{name}_file"] = str(error)
    try:
        if settings.database_password_file is not None and not _is_whole(settings, origins):
            changed["database"] = with_password(settings.database, settings.database_password_file)
    except InvalidInput as error:
        troubles["database_password_file"] = str(error)
    if troubles and strict:
        raise InvalidInput("\n".join(troubles.values()))
    return Configuration(settings.model_copy(update=changed), changed_origins, troubles)


RANK = {"default": 0, "file": 1, "environment": 2, "flag": 3}
"""Precedence of sources: the higher wins."""


def _takes_precedence(name: str, other: str, origins: Mapping[str, Origin]) -> bool:
    """Return True if the first of two settings for one secret wins; raise if neither does."""
    first, second = origins[name], origins[other]
    if RANK[first.kind] == RANK[second.kind]:
        both = " and ".join(_named((setting,), origins[setting]) for setting in (other, name))
        raise InvalidInput(f"{both} set the same secret; leave out one of the two")
    return RANK[first.kind] > RANK[second.kind]


def _is_whole(settings: ServerSettings, origins: Mapping[str, Origin]) -> bool:
    """Return True if the database's URL takes precedence over the password file."""
    database, password = origins["database"], origins["database_password_file"]
    if RANK[database.kind] <= RANK[password.kind]:
        return False
    return not is_url(settings.database) or has_password(settings.database)


MAX_BYTES = 64 * 2**10
"""Longest secret read, so that a wrong path cannot fill the memory."""


def read_secret(path: Path) -> str:
    """Return the one line of a file, without the line end that editors add."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"cannot read the secret in {path}: {why}") from None
    if not text or "\n" in text or len(text) > MAX_BYTES:
        raise InvalidInput(f"{path} has to contain one secret on one line")
    return text


def with_password(address: str, path: Path) -> str:
    """Return a database's URL with the password from a file."""
    if not is_url(address):
        raise InvalidInput(
            "database_password_file needs a database of the form postgresql://user@host:port/name"
        )
    if has_password(address):
        raise InvalidInput("The database's URL already has a password. Leave out one of the two.")
    from ..store.database import POSTGRESQL, database_url

    url = database_url(address).set(drivername=POSTGRESQL, password=read_secret(path))
    return url.render_as_string(hide_password=False)


def is_url(address: str) -> bool:
    """Return True for a database's URL, False for the path of a SQLite file."""
    return "://" in address


def has_password(address: str) -> bool:
    """Return True if a database's URL contains a password."""
    # Imported here: SQLAlchemy takes long to import, and most commands have no such URL.
    from ..store.database import database_url

    return database_url(address).password is not None
