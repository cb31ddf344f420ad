"""The same daemon for a user who is not root."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support.site import PATIENCE, Site, as_root

_CHECKOUT = Path(__file__).resolve().parents[2]
_NOBODY = 65534

#: A mount namespace in which everybody may use FUSE, as is usual; what is mounted in it goes with it.
_OPEN_FUSE = (
    'mount -t tmpfs -o mode=755,dev tmpfs "$0/dev"; mknod "$0/dev/fuse" c 10 229; chmod 666 "$0/dev/fuse"; '
    'mount --bind "$0/dev/fuse" /dev/fuse; exec "$@"'
)


#: Makes a file that may open raw sockets.
_CAPABLE = """
import os, pathlib, struct, sys
path = pathlib.Path(sys.argv[1])
path.write_text("one\\n")
path.chmod(0o666)
os.setxattr(path, "security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0))
"""


@pytest.fixture
def base() -> Iterator[Path]:
    place = Site(Path(tempfile.mkdtemp(prefix="cogfs-e2e-")))
    place.base.chmod(0o755)
    for path in (place.state, place.runtime, place.base / "dev"):
        path.mkdir()
    try:
        yield place.base
    finally:
        place.close()


def test_directories_and_files_that_a_user_closed(base: Path) -> None:
    subprocess.run(
        [*as_root(), "chown", str(_NOBODY), *(str(base / name) for name in ("state", "run", "project"))], check=True
    )
    subprocess.run([*as_root(), sys.executable, "-c", _CAPABLE, str(base / "project" / "capable")], check=True)
    as_user = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "env", f"HOME={base / 'state'}"]
    program = [sys.executable, "-m", "tests.e2e.support.unprivileged", str(base)]
    done = subprocess.run(
        [*as_root(), "unshare", "-m", "sh", "-ec", _OPEN_FUSE, str(base), *as_user, *program],
        cwd=_CHECKOUT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
