"""Whether a session of an agent takes file checkpoints: its switch, and its settings as an object or a file.

Knows no daemon. A settings file is read and never written.
"""

from __future__ import annotations

import copy
import json
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cogfs.client.errors import ValidationError

#: Settings as an object, or the absolute path of a JSON file that holds one.
SettingsArgument = Mapping[str, Any] | str | os.PathLike[str]

#: Where settings say it.
KEY = "general.fileCheckpointing.enabled"

_FILE_BYTES_MAX = 1 << 20


class SettingsWarning(UserWarning):
    """The switch of a session and its settings file say different things; the file counts."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What a session was told of file checkpoints."""

    #: On, off, or None when nothing says.
    enabled: bool | None
    #: The settings to go on with: a new object into which the switch is merged, or the file's path as it was given.
    settings: dict[str, Any] | str | None
    #: Where it has to be turned on, for a sentence.
    where: str


def resolve(enable_file_checkpointing: bool | None, settings: SettingsArgument | None) -> Checkpointing:
    """What the switch and the settings come to.

    In an object, the switch is put in the place of ``general.fileCheckpointing.enabled``; all else stays, and the
    caller's object is left as it is. A file is not changed and counts alone: a switch that it contradicts is a
    SettingsWarning. ValidationError for what is neither, and for settings that cannot be read.
    """
    if enable_file_checkpointing is not None and not isinstance(enable_file_checkpointing, bool):
        raise ValidationError(f"enable_file_checkpointing is true, false or None, not {enable_file_checkpointing!r}")
    if isinstance(settings, str | os.PathLike):
        path = os.fspath(settings)
        enabled = _enabled(_read(path))
        if enable_file_checkpointing is not None and bool(enabled) is not enable_file_checkpointing:
            says = f"sets {KEY} to {json.dumps(enabled)}" if enabled is not None else f"does not set {KEY}"
            warnings.warn(
                f"enable_file_checkpointing={enable_file_checkpointing} has no effect: the settings file {path} {says}",
                SettingsWarning,
                stacklevel=3,
            )
        return Checkpointing(enabled, path, f"set {KEY} to true in {path}")
    where = "open it with enable_file_checkpointing=True"
    if settings is None:
        if enable_file_checkpointing is None:
            return Checkpointing(None, None, where)
        merged: dict[str, Any] = {}
    elif isinstance(settings, Mapping):
        merged = copy.deepcopy(dict(settings))
    else:
        raise ValidationError(f"settings are an object or the absolute path of a file, not {settings!r}")
    said = _enabled(merged)
    if enable_file_checkpointing is None:
        return Checkpointing(said, merged, where)
    general = merged["general"] = dict(merged.get("general") or {})
    general["fileCheckpointing"] = {
        **(general.get("fileCheckpointing") or {}),
        "enabled": enable_file_checkpointing,
    }
    return Checkpointing(enable_file_checkpointing, merged, where)


def _enabled(settings: Mapping[str, Any]) -> bool | None:
    """What settings say; None when they do not."""
    value: Any = settings
    *above, last = KEY.split(".")
    for name in above:
        value = value.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValidationError(f"in the settings, {name} is {value!r} and has to be an object (for {KEY})")
    enabled = value.get(last)
    if enabled is not None and not isinstance(enabled, bool):
        raise ValidationError(f"in the settings, {KEY} is {enabled!r} and has to be true or false")
    return enabled


def _read(path: str) -> dict[str, Any]:
    """The object that a settings file holds."""
    if not isinstance(path, str) or not os.path.isabs(path):
        raise ValidationError(f"settings are an object or the absolute path of a file, not {path!r}")
    try:
        # A fifo must not hold the caller up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValidationError(f"the settings {path} are no file")
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ValidationError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"settings are an object or the absolute path of a file, not {path!r}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ValidationError(f"the settings file {path} is larger than {_FILE_BYTES_MAX:,} bytes")
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"the settings file {path} is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValidationError(f"the settings file {path} holds no object")
    return settings
