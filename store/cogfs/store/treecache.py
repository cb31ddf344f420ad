"""The decoded trees that were read last. They are by hash, so none of them is ever old."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cogfs.store.schema import Hash, Tree

#: They are kept up to so many entries in all.
_CACHED_ENTRIES = 50_000


class TreeCache:
    """Its methods may be called by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: OrderedDict[Hash, Tree] = OrderedDict()
        self._entries = 0

    def get(self, name: Hash) -> Tree | None:
        with self._lock:
            tree = self._trees.get(name)
            if tree is not None:
                self._trees.move_to_end(name)
            return tree

    def put(self, name: Hash, tree: Tree) -> None:
        cost = len(tree.entries) + 1
        if cost > _CACHED_ENTRIES // 4:
            return
        with self._lock:
            if name not in self._trees:
                self._trees[name] = tree
                self._entries += cost
            while self._entries > _CACHED_ENTRIES:
                _, dropped = self._trees.popitem(last=False)
                self._entries -= len(dropped.entries) + 1
