"""Random changes of a directory, by every kind of call that changes one: the same for the same dice."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

#: More of what gives files other names, and names other files.
NAMES = {"link": 6, "rename_over": 8, "unlink": 4, "rename_directory": 1, "remove_tree": 1, "patch": 2}
#: Bytes of a file now and then: one that the undo log takes as a whole, and one of which it takes parts.
_LARGE = (400_000, 2_500_000)


class Churn:
    """Changes below ``root``. What fails because the mount is away fails with OSError."""

    def __init__(self, root: Path, dice: random.Random, weights: Mapping[str, int] | None = None) -> None:
        """``weights``: how often some of the changes are made, when it is not as often as usual."""
        self.root = root
        self.dice = dice
        #: Of the names that are made.
        self.prefix = "n"
        self._number = 0
        self._acts: list[tuple[int, Callable[[], None]]] = [
            (6, self.create),
            (5, self.overwrite),
            (4, self.append),
            (5, self.patch),
            (2, self.truncate),
            (4, self.unlink),
            (4, self.rename),
            (2, self.rename_over),
            (3, self.rename_directory),
            (2, self.make_directory),
            (2, self.remove_tree),
            (2, self.link),
            (1, self.symlink),
            (2, self.chmod),
            (1, self.chmod_directory),
            (1, self.xattr),
            (1, self.exclude),
        ]
        self._acts = [((weights or {}).get(act.__name__, usual), act) for usual, act in self._acts]

    def run(self, count: int) -> None:
        """So many changes."""
        weights = [weight for weight, _ in self._acts]
        for _ in range(count):
            act = self.dice.choices(self._acts, weights)[0][1]
            # Two names may be the same, or one below the other.
            with contextlib.suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
                try:
                    act()
                except OSError as error:
                    # ELOOP: a link that was moved to the name that it leads to.
                    if error.errno not in (errno.EINVAL, errno.ENOTEMPTY, errno.ELOOP):
                        raise

    def fill(self, directories: int, files: int) -> None:
        """A tree to begin with."""
        for _ in range(directories):
            self.make_directory()
        for _ in range(files):
            self.create()
        self.link()
        self.symlink()

    # --- choosing

    def _walk(self) -> tuple[list[Path], list[Path]]:
        directories, files = [self.root], []
        for where, below, names in os.walk(self.root):
            below[:] = sorted(name for name in below if name != "node_modules")
            directories += [Path(where, name) for name in below if not Path(where, name).is_symlink()]
            files += [Path(where, name) for name in sorted(names)]
        return directories, files

    def _directory(self, *, root: bool = True) -> Path:
        directories, _ = self._walk()
        if not root:
            del directories[0]
        if not directories:
            raise FileNotFoundError
        return self.dice.choice(directories)

    def files(self) -> list[Path]:
        """All that are not left out."""
        return self._walk()[1]

    def _file(self) -> Path:
        files = self.files()
        if not files:
            raise FileNotFoundError
        return self.dice.choice(files)

    def _new(self) -> Path:
        self._number += 1
        return self._directory() / f"{self.prefix}{self._number}"

    def _content(self) -> bytes:
        size = self.dice.choice(_LARGE) if self.dice.random() < 0.06 else self.dice.randrange(2000)
        return self.dice.randbytes(size)

    # --- changing

    def create(self) -> None:
        self._new().write_bytes(self._content())

    def overwrite(self) -> None:
        with open(self._file(), "r+b") as file:
            file.write(self._content())

    def append(self) -> None:
        with open(self._file(), "ab") as file:
            file.write(b"more\n")

    def patch(self) -> None:
        """Write into a file here and there; the larger, the more likely."""
        path = max((self._file() for _ in range(4)), key=lambda path: path.lstat().st_size)
        with open(path, "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(self.dice.randrange(1, 4)):
                file.seek(self.dice.randrange(size + 1))
                file.write(self.dice.randbytes(self.dice.randrange(1, 9000)))

    def truncate(self) -> None:
        path = self._file()
        if not path.is_symlink():
            os.truncate(path, self.dice.randrange(100))

    def unlink(self) -> None:
        self._file().unlink()

    def rename(self) -> None:
        self._file().rename(self._new())

    def rename_over(self) -> None:
        os.replace(self._file(), self._file())

    def rename_directory(self) -> None:
        os.rename(self._directory(root=False), self._new())

    def make_directory(self) -> None:
        self._new().mkdir()

    def remove_tree(self) -> None:
        shutil.rmtree(self._directory(root=False))

    def link(self) -> None:
        path = self._file()
        if not path.is_symlink():
            os.link(path, self._new())

    def symlink(self) -> None:
        self._new().symlink_to(f"target{self._number}")

    def chmod(self) -> None:
        path = self._file()
        if not path.is_symlink():
            path.chmod(self.dice.choice((0o600, 0o644, 0o755)))

    def chmod_directory(self) -> None:
        self._directory(root=False).chmod(self.dice.choice((0o700, 0o755, 0o750)))

    def xattr(self) -> None:
        path = self._file()
        if not path.is_symlink():
            with contextlib.suppress(OSError):  # not every filesystem has them
                os.setxattr(path, "user.test", self.dice.randbytes(8))

    def exclude(self) -> None:
        """Over the border of what is left out, this way or that."""
        outside = self.root / "node_modules"
        outside.mkdir(exist_ok=True)
        kept = sorted(outside.iterdir())
        if kept and self.dice.random() < 0.5:
            os.rename(self.dice.choice(kept), self._new())
        else:
            self._number += 1
            os.rename(
                self.dice.choice((self._file, lambda: self._directory(root=False)))(),
                outside / f"{self.prefix}{self._number}",
            )
