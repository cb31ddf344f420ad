"""What the configuration file says, and the variables of the environment that overrule it.

Owns the keys, their defaults and their bounds. Must not know what is made of them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cogfs.fsd.control import logs
from cogfs.fsd.control.errors import from_os_error, invalid
from cogfs.fsd.control.patience import Patience
from cogfs.store.recent import GRACE

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_BYTES = 1 << 60
_MAX_GRACE = 366 * 86400.0
_MAX_WAIT = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one daemon."""

    #: Bytes that the packs of the store may take; 0: any number.
    max_bytes: int = 0
    #: Seconds for which what came into the store stays there, needed or not.
    gc_grace: float = GRACE
    patience: Patience = field(default_factory=Patience)
    log_level: str = logs.USUAL


def _size(value: object) -> int:
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        value = round(float(found[1]) * _FACTORS[found[2].lower()])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_BYTES:
        raise ValueError('a number of bytes, or one like "20 GiB"; 0 for any')
    return value


def _time(limit: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        found = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is not None:
            value = float(found[1]) * _SECONDS[found[2].lower()]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
            raise ValueError(f'seconds from 0 to {limit:.0f}, or a time like "90s", "2h"')
        return float(value)

    return read


def _level(value: object) -> str:
    if value not in logs.LEVELS:
        raise ValueError(f"one of {', '.join(logs.LEVELS)}")
    return str(value)


#: Every key of the file, by its table, with how its value is read.
KEYS: dict[str, dict[str, Callable[[object], Any]]] = {
    "store": {"max_bytes": _size, "gc_grace": _time(_MAX_GRACE)},
    "runs": {"tool_settle": _time(_MAX_WAIT), "grace": _time(_MAX_WAIT)},
    "log": {"level": _level},
}


def load(environ: Mapping[str, str], uid: int) -> Settings:
    """The settings of a daemon; without a file, the defaults. VALIDATION_ERROR when something is unknown or makes no
    sense, IO when the file cannot be read."""
    said = _read(environ, uid)
    store, runs = said.get("store", {}), said.get("runs", {})
    usual = Settings()
    return Settings(
        max_bytes=store.get("max_bytes", usual.max_bytes),
        gc_grace=store.get("gc_grace", usual.gc_grace),
        patience=Patience(
            _overruled(environ, "COGFS_TOOL_SETTLE", runs.get("tool_settle", usual.patience.tool_settle)),
            _overruled(environ, "COGFS_RUN_GRACE", runs.get("grace", usual.patience.grace)),
        ),
        log_level=said.get("log", {}).get("level", usual.log_level),
    )


def path(environ: Mapping[str, str], uid: int) -> Path:
    """Where the file is, if there is one."""
    chosen = environ.get("COGFS_CONFIG", "")
    if chosen:
        if not chosen.startswith("/"):
            raise invalid(f"COGFS_CONFIG must be an absolute path, not {chosen!r}")
        return Path(chosen)
    if uid == 0:
        return Path("/etc/cogfs/config.toml")
    home = environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if home.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".config"
    return base / "cogfs" / "config.toml"


def _read(environ: Mapping[str, str], uid: int) -> dict[str, dict[str, Any]]:
    file = path(environ, uid)
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        if environ.get("COGFS_CONFIG"):
            raise invalid(f"there is no file {file}, which COGFS_CONFIG names") from None
        return {}
    except UnicodeDecodeError:
        raise invalid(f"{file} is not valid UTF-8") from None
    except OSError as error:
        if not environ.get("COGFS_CONFIG") and not _is_seen(file):
            return {}
        raise from_os_error(error, f"read {file}") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{file} is not valid TOML: {error}") from error
    return {table: _table(file, table, values) for table, values in tables.items()}


def _is_seen(file: Path) -> bool:
    """Whether we may know that it is there. A home that is closed to us has no settings for us."""
    try:
        file.lstat()
    except OSError:
        return False
    return True


def _table(file: Path, table: str, values: object) -> dict[str, Any]:
    keys = KEYS.get(table)
    if keys is None or not isinstance(values, dict):
        raise invalid(f"{file}: there is no table [{table}]: those that there are: {', '.join(KEYS)}")
    read = {}
    for key, value in values.items():
        if key not in keys:
            raise invalid(f"{file}: [{table}] has no key {key!r}: those that it has: {', '.join(keys)}")
        try:
            read[key] = keys[key](value)
        except ValueError as error:
            raise invalid(f"{file}: {table}.{key} must be {error}, not {value!r}") from None
    return read


def _overruled(environ: Mapping[str, str], name: str, value: float) -> float:
    """What a variable says, where it is set."""
    text = environ.get(name, "")
    if not text:
        return value
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MAX_WAIT:
        raise invalid(f"{name} must be a number of seconds from 0 to {_MAX_WAIT:.0f}, not {text!r}")
    return seconds
