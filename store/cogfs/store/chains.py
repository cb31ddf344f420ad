"""Objects that are stored against others: what one of them is decoded from, and decoding it.

A *chain* is an object, its base, the base of that, and so on to one that needs none. Nothing in it is trusted: of what
comes out, the hash is compared, and where it is wrong each of the chain is looked at to name the one that is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cogfs.store import codec
from cogfs.store.errors import Corrupt
from cogfs.store.groups import Groups
from cogfs.store.hashing import hash_object
from cogfs.store.location import Location
from cogfs.store.records import RECORD_HEADER_SIZE
from cogfs.store.schema import Hash

#: Bases that an object may need when it is put.
MAX_DEPTH = 8
#: Bases that are followed. More are no chain, but a ring.
_FOLLOWED = 100


class Link(NamedTuple):
    """An object of a chain, and where it is."""

    name: Hash
    location: Location


class Chain(NamedTuple):
    """What an object is decoded from."""

    #: The object first.
    links: tuple[Link, ...]
    #: Why there is no more of it, though the last link needs a base; empty: it is whole.
    broken: str = ""

    @property
    def depth(self) -> int:
        """How many bases it takes."""
        return len(self.links) - 1


def follow(find: Callable[[Hash], Location | None], name: Hash, location: Location) -> Chain:
    """The chain of the object ``name``, which is at ``location``."""
    links = [Link(name, location)]
    while location.is_delta:
        base = location.base
        if len(links) > _FOLLOWED:
            return Chain(tuple(links), "it needs too many others")
        try:
            found = find(base)
        except Corrupt as error:
            return Chain(tuple(links), str(error))
        if found is None:
            return Chain(tuple(links), f"it needs object {base.hex()}, which is not there")
        if found.kind != location.kind:
            return Chain(tuple(links), f"it needs object {base.hex()}, which is of another kind")
        links.append(Link(base, found))
        location = found
    return Chain(tuple(links))


def read(groups: Groups, chain: Chain) -> bytes:
    """The verified bytes of the object. Corrupt, whose ``source`` is the one of the chain that is damaged; StoreIO."""
    name, location = chain.links[0]
    if chain.broken:
        raise Corrupt(f"object {name.hex()} is damaged: {chain.broken}", name)
    try:
        data = b""
        for _, where in reversed(chain.links):
            data = _decode(groups, where, data)
    except ValueError as error:
        raise _damaged(groups, chain, f"it cannot be decoded ({error})") from error
    except Corrupt as error:
        raise _damaged(groups, chain, str(error)) from error
    if hash_object(location.kind, data) != name:
        raise _damaged(groups, chain, "its content does not match its hash")
    return data


def _decode(groups: Groups, where: Location, base: bytes) -> bytes:
    if where.is_grouped:
        return groups.read(where)
    payload = groups.packs.read(where.pack, where.offset + RECORD_HEADER_SIZE, where.stored)
    return codec.decode(where.codec, payload, where.raw, base)


def _damaged(groups: Groups, chain: Chain, why: str) -> Corrupt:
    """The error for a chain that gives no right bytes. StoreIO."""
    groups.forget()
    name = chain.links[0].name
    data = b""
    for link_name, where in reversed(chain.links[1:]):
        try:
            data = _decode(groups, where, data)
            if hash_object(where.kind, data) == link_name:
                continue
        except (ValueError, Corrupt):
            pass
        text = f"object {name.hex()} is damaged: it is stored against object {link_name.hex()}, which is damaged"
        return Corrupt(text, name, link_name)
    return Corrupt(f"object {name.hex()} is damaged: {why}", name, name)
