"""Names of files as text: a reversible escaping of bytes, for JSON and for terminals. Knows no API.

What is valid UTF-8 stays as it is, except that a backslash becomes ``\\\\`` and each byte of a control character, or of
anything that is not UTF-8, becomes ``\\xHH``. Also escaped are the marks that reorder or break a line on a terminal:
a name that hides its end or moves others is shown for what it is.
"""

from __future__ import annotations

import re

#: Categories Cc, and the characters of Cf, Zl and Zp that turn the direction of text or end a line. A fixed set, so
#: that the escaping of a name does not depend on the version of Unicode that an interpreter knows.
_UNSAFE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
#: ``surrogateescape`` turns a byte that is not UTF-8 into one of these.
_UNDECODABLE = "\udc80-\udcff"
_NAME = re.compile(f"[\\\\{_UNSAFE}{_UNDECODABLE}]")
_TEXT = re.compile(f"[\\\\{_UNSAFE}{_UNDECODABLE}]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_DISPLAY = re.compile(f"[{_UNSAFE}\ud800-\udfff]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_ESCAPE = re.compile(rb"\\(?:(\\)|x([0-9a-fA-F]{2}))?")


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    if character == "\\":
        return "\\\\"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def _unescaped(match: re.Match[bytes]) -> bytes:
    if match[1]:
        return b"\\"
    if match[2]:
        return bytes([int(match[2], 16)])
    raise ValueError(f"a backslash at byte {match.start()} begins no escape")


def escape(name: bytes) -> str:
    """``name`` as one line of printable text. ``unescape`` gives it back."""
    return _NAME.sub(_escaped, name.decode("utf-8", "surrogateescape"))


def escape_text(content: bytes) -> str:
    """As ``escape``, for content of several lines: newlines and tabs stay. ``unescape`` gives it back."""
    return _TEXT.sub(_escaped, content.decode("utf-8", "surrogateescape"))


def unescape(text: str) -> bytes:
    """The bytes of which ``text`` is the escaping. ValueError when it is none."""
    return _ESCAPE.sub(_unescaped, text.encode("utf-8"))


def printable(text: str) -> str:
    """``text`` for a terminal: newlines and tabs stay, what else could steer the terminal is shown as U+FFFD."""
    return _DISPLAY.sub("\ufffd", text)
