"""What the agent is asked, and the shell commands with which it does it. Knows nothing of the product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A user's message, what happens then in the project's directory, and the assistant's answer."""

    message: str
    #: For ``bash -euo pipefail``; ``$PYTHON`` is an interpreter with SQLite.
    script: str
    answer: str


SYSTEM = "You work in a Python library with a shell."

TURNS = (
    Turn(
        "Mark where the operating system is used.",
        """
        grep -rlZ --include='*.py' -x 'import os' lib packages | sort -z >"$SCRATCH/list"
        head -z -n 300 "$SCRATCH/list" | xargs -0 -r sed -i 's/^import os$/import os  # the operating system/'
        """,
        "Three hundred modules are marked.",
    ),
    Turn(
        "We need neither mail nor XML: remove them.",
        """
        rm -rf lib/email lib/xml
        rm -f lib/antigravity.py lib/this.py
        """,
        "Both packages are gone.",
    ),
    Turn(
        "Call json 'serialization', move asyncio into it, and fix the imports.",
        """
        mv lib/json lib/serialization
        mv lib/asyncio lib/serialization/aio
        grep -rlZ --include='*.py' 'import json' lib | xargs -0 -r sed -i 's/import json/import serialization/'
        mv lib/serialization/aio/base_events.py lib/serialization/aio/events.py
        """,
        "Moved; one file went over another.",
    ),
    Turn(
        "Link what is shared, and mind the modes.",
        """
        mkdir shared
        ln -s ../lib/logging shared/logging
        ln -s ../lib/abc.py shared/abc.py
        ln -s nowhere/at/all shared/dangling
        ln lib/heapq.py shared/heapq.py
        ln lib/heapq.py shared/queue.py
        ln lib/bisect.py lib/logging/bisect.py
        chmod -R go-rwx lib/logging
        chmod 0444 lib/ast.py lib/cmd.py
        chmod 0755 lib/code.py
        chmod 02750 shared
        mkdir -p empty/in/depth
        """,
        "Links, modes and an empty directory.",
    ),
    Turn(
        "Write notes with the names that people really use.",
        r"""
        mkdir -p notes/'a directory with spaces' notes/日本語 $'notes/li\xe9ge'
        echo one >notes/'a directory with spaces'/'a file with  two spaces '
        echo two >$'notes/two\nlines'
        echo three >notes/日本語/'ノート 名前.txt'
        echo four >$'notes/li\xe9ge/caf\xe9-\xff\xfe'
        echo five >notes/-rf
        echo six >$'notes/back\\slash\ttab'
        ln -s $'li\xe9ge/caf\xe9-\xff\xfe' $'notes/link-\xff'
        ln $'notes/two\nlines' notes/日本語/同じ
        """,
        "Notes are written.",
    ),
    Turn(
        "Keep measurements in a database, and a log.",
        """
        mkdir data
        "$PYTHON" - <<'PYTHON'
import os, sqlite3
database = sqlite3.connect("data/measured.db")
assert database.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
database.execute("CREATE TABLE measured (id INTEGER PRIMARY KEY, text TEXT)")
database.executemany("INSERT INTO measured (text) VALUES (?)", [(f"row {n} " + "x" * 200,) for n in range(2000)])
database.commit()
# Without closing it: what was committed stands in the write-ahead log.
os._exit(0)
PYTHON
        head -c 5242880 /dev/urandom >data/measured.log
        """,
        "The database is in WAL mode; the log has 5 MB.",
    ),
    Turn(
        "Measure again, and append to the log.",
        """
        "$PYTHON" - <<'PYTHON'
import os, sqlite3
database = sqlite3.connect("data/measured.db")
database.executemany("INSERT INTO measured (text) VALUES (?)", [(f"again {n}",) for n in range(500)])
database.execute("DELETE FROM measured WHERE id % 7 = 0")
database.commit()
os._exit(0)
PYTHON
        echo "one more line" >>data/measured.log
        """,
        "Appended.",
    ),
    Turn(
        "Commit that, and compile everything.",
        """
        git add -A
        git commit -q -m "What the agent did"
        "$PYTHON" -m compileall -q lib >/dev/null || true
        git status --porcelain >"$SCRATCH/list"
        """,
        "Committed and compiled.",
    ),
    Turn(
        "Now tidy up.",
        r"""
        # Other kinds under the same names.
        rm -rf lib/curses && echo 'a file now' >lib/curses
        rm lib/cmd.py && mkdir lib/cmd.py && echo 'pass' >lib/cmd.py/__init__.py
        rm -r notes/日本語 && ln -s ../shared notes/日本語
        rm shared/dangling && echo 'not a link' >shared/dangling
        # Through a link of a file, in place and not.
        echo '# appended through the other name' >>shared/queue.py
        sed -i '1i # written anew' shared/heapq.py
        mv $'notes/two\nlines' notes/-rf
        truncate -s 1000000 data/measured.log
        : >lib/bisect.py
        rmdir empty/in/depth
        chmod -R u=rwX,go=rX lib/logging
        find lib -name '__pycache__' -prune -exec rm -rf {} +
        """,
        "Tidied up.",
    ),
    Turn(
        "Drop the packages, they are installed elsewhere.",
        """
        mkdir attic
        mv packages attic/packages
        find attic/packages -name '*.so' -delete
        git rm -rq --cached packages
        git add -A
        git commit -q -m "No packages"
        rm -rf attic
        """,
        "Dropped.",
    ),
)
