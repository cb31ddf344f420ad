"""What the documents point at is there."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
#: `e2e/test_fork::test_many_at_once`, `e2e/test_fork`, or `::test_many_at_once` of the file that was named before.
_TEST = re.compile(r"`((?:client|control|ctl|e2e|mount|packaging|store)/test_\w+)?(?:::(test_\w+))?`")


def test_each_test_that_shows_a_behaviour_exists() -> None:
    named = 0
    for line in (_ROOT / "docs" / "semantics.md").read_text().splitlines():
        text = ""
        for file, test in _TEST.findall(line):
            if file:
                path = _ROOT / "tests" / f"{file}.py"
                assert path.exists(), line
                text = path.read_text()
            if test:
                assert f"def {test}(" in text, line
            named += 1
    assert named > 100


def test_each_behaviour_has_a_place_and_a_test_or_is_said_to_be_absent() -> None:
    rows = [line for line in (_ROOT / "docs" / "semantics.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        behaviour, where, shown = (cell.strip() for cell in row.removeprefix("|").removesuffix("|").split("|"))
        if behaviour == "behaviour":
            continue
        spared = any(word in f"{behaviour} {where}" for word in ("*absent*", "*Otherwise:*", "*otherwise:*"))
        assert shown or spared or behaviour == "Effects outside of the files are not undone", row
