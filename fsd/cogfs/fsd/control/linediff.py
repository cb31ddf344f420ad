"""Lines added and removed between two versions of a file, and unified diffs. Knows bytes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patiencediff import PatienceSequenceMatcher

#: Larger files are not compared by line.
MAX_BYTES = 32 * 1024 * 1024

#: A zero byte within the first so many bytes makes a file binary (the rule that git goes by).
_SNIFF = 8000
_CONTEXT = 3


@dataclass(frozen=True, slots=True)
class LineChange:
    insertions: int = 0
    deletions: int = 0
    binary: bool = False
    #: A unified diff without its two header lines; empty for binary files.
    hunks: bytes = b""


def is_binary(data: bytes) -> bool:
    return len(data) > MAX_BYTES or b"\0" in data[:_SNIFF]


def compare(old: bytes, new: bytes, *, unified: bool = False) -> LineChange:
    """What leads from ``old`` to ``new``."""
    if is_binary(old) or is_binary(new):
        return LineChange(binary=True)
    before, after = _lines(old), _lines(new)
    if not unified and (not before or not after):
        return LineChange(len(after), len(before))
    matcher = PatienceSequenceMatcher(None, before, after)
    opcodes = matcher.get_opcodes()
    insertions = deletions = 0
    for tag, a_start, a_end, b_start, b_end in opcodes:
        if tag != "equal":
            deletions += a_end - a_start
            insertions += b_end - b_start
    hunks = b"".join(_hunks(opcodes, before, after)) if unified else b""
    return LineChange(insertions, deletions, hunks=hunks)


def _lines(data: bytes) -> list[bytes]:
    """Lines with their newlines; only a newline ends one."""
    lines = data.split(b"\n")
    last = lines.pop()
    whole = [line + b"\n" for line in lines]
    if last:
        whole.append(last)
    return whole


Opcode = tuple[str, int, int, int, int]


def _grouped(opcodes: Sequence[Opcode]) -> Iterator[list[Opcode]]:
    """Opcodes in hunks: changes with up to three equal lines around them, apart when more than six lie between."""
    group: list[Opcode] = []
    for tag, a_start, a_end, b_start, b_end in opcodes:
        if tag != "equal":
            group.append((tag, a_start, a_end, b_start, b_end))
            continue
        length = a_end - a_start
        if not group:
            lead = min(_CONTEXT, length)
            group = [("equal", a_end - lead, a_end, b_end - lead, b_end)]
        elif length > 2 * _CONTEXT:
            group.append(("equal", a_start, a_start + _CONTEXT, b_start, b_start + _CONTEXT))
            yield group
            group = [("equal", a_end - _CONTEXT, a_end, b_end - _CONTEXT, b_end)]
        else:
            group.append(("equal", a_start, a_end, b_start, b_end))
    if any(op[0] != "equal" for op in group):
        tag, a_start, a_end, b_start, b_end = group[-1]
        if tag == "equal":
            trail = min(_CONTEXT, a_end - a_start)
            group[-1] = (tag, a_start, a_start + trail, b_start, b_start + trail)
        yield group


def _hunks(opcodes: Sequence[Opcode], before: list[bytes], after: list[bytes]) -> Iterator[bytes]:
    for group in _grouped(opcodes):
        a_start, a_end, b_start, b_end = group[0][1], group[-1][2], group[0][3], group[-1][4]
        yield b"@@ -%s +%s @@\n" % (_range(a_start, a_end), _range(b_start, b_end))
        for tag, a_from, a_to, b_from, b_to in group:
            if tag == "equal":
                yield from (_marked(b" ", line) for line in before[a_from:a_to])
            else:
                yield from (_marked(b"-", line) for line in before[a_from:a_to])
                yield from (_marked(b"+", line) for line in after[b_from:b_to])


def _marked(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _range(start: int, end: int) -> bytes:
    length = end - start
    first = start + 1 if length else start
    return b"%d" % first if length == 1 else b"%d,%d" % (first, length)
