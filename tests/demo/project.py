"""A real project to work on: this machine's Python library with its packages. Knows nothing of the product."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FILES = 3000
_LARGEST = 2 << 20
_LEFT_OUT = {"__pycache__", "test", "tests", "idle_test", "node_modules", ".git"}


def make(root: Path) -> tuple[int, int]:
    """Copies the library to ``root`` and makes it a git repository; the number of files and their bytes."""
    files = size = 0
    root.mkdir()
    for source, place in _sources():
        for path in _files(source):
            if files == FILES:
                break
            target = root / place / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target):
                # Two sets of packages can hold the same one.
                continue
            try:
                shutil.copy(path, target, follow_symlinks=False)
            except PermissionError:
                # The library may hold what only root may read.
                continue
            files += 1
            size += target.lstat().st_size
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "The library as it is")
    return files, size


def git(root: Path, *arguments: str) -> None:
    """``git`` in ``root``, without the configuration of whoever runs this."""
    subprocess.run(["git", *arguments], cwd=root, env=environment(), check=True)


def environment() -> dict[str, str]:
    """The environment of the session's commands."""
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in _IDENTITY.items()}
    settings = {"gc.auto": "0", "maintenance.auto": "false", "core.autocrlf": "false", "commit.gpgsign": "false"}
    configured = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        configured |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHON", "COGFS_"))}
    return kept | who | configured | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"}


_IDENTITY = {"NAME": "Demo", "EMAIL": "demo@example.org"}


def _sources() -> Iterator[tuple[Path, str]]:
    """Directories of the library, and where their files go."""
    paths = sysconfig.get_paths(vars={"base": sysconfig.get_config_var("installed_base")})
    library = Path(sysconfig.get_path("stdlib"))
    yield library, "lib"
    candidates = {
        library.parent / "python3" / "dist-packages",
        Path(paths["purelib"]),
        *map(Path, site.getsitepackages()),
    }
    for packages in sorted(candidates):
        if packages.is_dir() and not packages.is_relative_to(library):
            yield packages, "packages"


def _files(source: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(source):
        names[:] = sorted(name for name in names if name not in _LEFT_OUT)
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_symlink() or (path.is_file() and path.stat().st_size <= _LARGEST):
                yield path
