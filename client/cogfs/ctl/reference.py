"""The reference of ``cogfsctl`` as a page, from the commands and the table of reasons themselves.

``python -m cogfs.ctl.reference docs/cli.md`` writes it; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from cogfs.client.errors import CLASSES
from cogfs.ctl.main import FAULT_EXIT, USAGE_EXIT, app
from cogfs.v1.reasons import Reason

_HEAD = r"""# cogfsctl

This page is written by `make generate` from the commands themselves.

## What holds for every command

- A command that needs the daemon starts it when none answers; `cogfsctl --no-start COMMAND` does not.
- `--json` prints one JSON document on standard output, an error as well:
  `{"error": {"reason": …, "message": …, "metadata": {…}}}`. Only a mistake in the arguments that is found before a
  command begins is told on standard error alone.
- `restore`, `rewind`, `undo`, and `fork` with `--files` show the plan, ask, then act. With `--yes` they act at once,
  with `--dry-run` they show the plan alone. Where they cannot ask (with `--json`, or without a terminal) they need one
  of the two.
- An error is one sentence on standard error. `COGFS_DEBUG=1` shows the traceback of a fault.
- Without a terminal there are no colours and no progress, and no line is cut. `NO_COLOR=1` takes the colours away.
- Completion for bash, zsh and fish: `cogfsctl --install-completion`.

### JSON

Fields have the names of the API (`cogfs.v1`), and all of them are there. 64-bit numbers are numbers, timestamps RFC
3339 in UTC, durations in seconds (`"90s"`), values of enums their names in lower case, hashes hexadecimal; what is
unset is `null`. Lists are under a name: `workspaces`, `snapshots`, `threads`, `entries`, `handles`, `files`, `runs`,
`commands`. A message's document is its entry; that of `exec` is the command, with `exit_code`, and `pids` are those
that it left.

### Names of files

A name is any bytes without `/` and zero. In JSON and on the screen it is shown as it is where it is valid UTF-8, except
that a backslash becomes `\\`, and each byte of a control character, of a mark that turns the direction of text, or of
anything that is not UTF-8, becomes `\xHH`. This is reversible: `cogfs.client.names.unescape` gives the bytes, and so
does `printf '%b'` in bash. Diffs in JSON are escaped in the same way, but keep their newlines and tabs. What is typed
as an argument is taken as it is, without escapes.

A path of a file in a snapshot is below the root of its workspace, wherever you are (`src/main.py`), or absolute.

## Exit codes

`cogfsctl exec` passes on the exit code of its command, once that was started.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD, "| code | reason | when |", "|---:|---|---|"]
    lines.append("| 0 | | done |")
    lines.append(f"| {FAULT_EXIT} | | the answer was no, the reader of the output went away, or a fault of cogfsctl |")
    lines.append(f"| {USAGE_EXIT} | | the arguments make no sense |")
    for reason in Reason:
        meaning = (CLASSES[reason].__doc__ or "").strip().rstrip(".")
        lines.append(f"| {reason.exit_code} | `{reason.name}` | {meaning} |")
    lines += ["| 130 | | interrupted from the keyboard |", "", "## Commands", ""]
    _append(typer.main.get_command(app), "cogfsctl", None, lines)
    return "\n".join(lines).rstrip() + "\n"


def _append(command: Any, name: str, parent: Any, lines: list[str]) -> None:
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=100, max_content_width=100, help_option_names=["--help"]
    )
    lines += [f"### {context.command_path}", "", "```text", command.get_help(context).rstrip(), "```", ""]
    for child, below in getattr(command, "commands", {}).items():
        _append(below, child, context, lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
