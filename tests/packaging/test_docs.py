"""What the documents point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from cogfs.store import schema
from cogfs.store.database import Table

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


#: Rows that docs/format.md calls by the field that holds them.
_FIELDS_OF = {
    "options": "WorkspaceOptions",
    "stats": "SnapshotStats",
    "file_checkpoint": "FileCheckpointRow",
    "sums": "Sums",
}


def _table(header: str) -> list[list[str]]:
    """The cells of the rows of a table of docs/format.md."""
    lines = iter((_ROOT / "docs" / "format.md").read_text().splitlines())
    for line in lines:
        if line == header:
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[1:]


def test_the_format_names_the_tables_that_are_there() -> None:
    rows = _table("| table | key | value |")
    assert [row[0].strip("`") for row in rows] == list(Table)
    assert {len(row) for row in rows} == {3}


def test_the_format_names_the_fields_of_each_row_in_order() -> None:
    documented = {}
    table = _table("| row | fields |")
    for name, fields in table:
        bare = re.sub(r"\([^()]*\)|`[^`]*`", "", fields.split(";")[0])
        documented[_FIELDS_OF.get(name, name)] = [
            re.match(r"\w+", part.strip())[0]  # type: ignore[index]
            for part in re.split(r",| and ", bare)
        ]
    assert len(documented) == len(table)
    kept = {
        name: [field.name for field in msgspec.structs.fields(row)]
        for name, row in vars(schema).items()
        if isinstance(row, type) and issubclass(row, msgspec.Struct) and name in documented
    }
    assert documented == kept
    rows = {name for name, row in vars(schema).items() if isinstance(row, type) and name.endswith("Row")}
    # What ProcessRow is stands where it is used.
    assert rows - set(documented) == {"ProcessRow"}
