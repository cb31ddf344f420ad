"""The escaping of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cogfs.client.names import escape, escape_text, printable, unescape

#: Bytes with much of what is special: backslashes, controls, UTF-8 and parts of it.
_names = st.one_of(
    st.binary(),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.sampled_from([b"\\", b"x", b"0a", b"\n", b"\xe2\x80\xae", b"\xe4\xbd", b"\xa0", b"\x7f", b" "])).map(
        b"".join
    ),
)


@given(_names)
def test_escape_is_reversible(name: bytes) -> None:
    assert unescape(escape(name)) == name
    assert unescape(escape_text(name)) == name


@given(_names)
def test_escaped_name_is_one_line_and_steers_nothing(name: bytes) -> None:
    shown = escape(name)
    assert len(shown.splitlines()) <= 1
    assert printable(shown) == shown
    shown.encode("utf-8")


@given(_names, _names)
def test_different_names_are_shown_differently(one: bytes, other: bytes) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"src/main.py", "src/main.py"),
        ("文件 名.txt".encode(), "文件 名.txt"),
        (b" leading and 'quotes\"", " leading and 'quotes\""),
        (b"back\\slash", "back\\\\slash"),
        (b"\\x41", "\\\\x41"),
        (b"new\nline\ttab", "new\\x0aline\\x09tab"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"half \xe4\xbd", "half \\xe4\\xbd"),
        (b"\xc2\x9b", "\\xc2\\x9b"),
        (b"esc\x1b[31m", "esc\\x1b[31m"),
        ("gpj.\u202eexe".encode(), "gpj.\\xe2\\x80\\xaeexe"),
        (b"", ""),
    ],
)
def test_escape(name: bytes, shown: str) -> None:
    assert escape(name) == shown


def test_text_keeps_lines_and_tabs() -> None:
    assert escape_text(b"a\n\tb\\\r\x00\n") == "a\n\tb\\\\\\x0d\\x00\n"


@pytest.mark.parametrize("text", ["\\", "a\\b", "\\x4", "\\xgg", "\\x", "\\n"])
def test_unescape_refuses_what_is_no_escaping(text: str) -> None:
    with pytest.raises(ValueError, match="backslash"):
        unescape(text)


def test_printable_keeps_lines_and_disarms_the_rest() -> None:
    assert printable("a\n\tb\x1b[2J\r\u202ec\udc80") == "a\n\tb\ufffd[2J\ufffd\ufffdc\ufffd"
