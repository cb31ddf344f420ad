"""Names of objects: BLAKE3 of their raw bytes, in derive-key mode with one context for each kind.

The context makes a blob that holds the bytes of a tree another object than that tree.
"""

from __future__ import annotations

from blake3 import blake3

from cogfs.store.schema import Hash, ObjectKind

HASH_SIZE = 32

#: Part of the format: a change gives every object another name.
CONTEXTS = {
    ObjectKind.BLOB: "cogfs store 1 blob",
    ObjectKind.CHUNKS: "cogfs store 1 chunks",
    ObjectKind.TREE: "cogfs store 1 tree",
}


def hash_object(kind: ObjectKind, data: bytes | memoryview) -> Hash:
    """The name of the object of ``kind`` with the raw bytes ``data``. Releases the GIL."""
    return blake3(data, derive_key_context=CONTEXTS[kind]).digest()
