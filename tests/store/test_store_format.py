"""The bytes on disk are what the format says, for ever, and damage to them never gives wrong data."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cogfs.store import codec, groups, trees
from cogfs.store.errors import Corrupt, NotFound
from cogfs.store.hashing import hash_object
from cogfs.store.location import Location
from cogfs.store.objects import Recovered
from cogfs.store.packs import Packs
from cogfs.store.records import (
    PACK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    check_pack_header,
    pack_header,
    parse_record_header,
    record_header,
)
from cogfs.store.schema import Chunks, Kind, ObjectKind, OpaqueReason, Tree, TreeEntry
from cogfs.store.store import Store

FILE = TreeEntry(
    b"a\xff",
    Kind.FILE,
    mode=0o4755,
    size=300,
    hash=bytes(range(32)),
    xattrs=((b"user.a", b"1"), (b"user.b", b"")),
    link_group=7,
    uid=0,
    gid=1000,
)
ENTRIES = (
    FILE,
    TreeEntry(b"b", Kind.DIRECTORY, mode=0o755, hash=bytes(32)),
    TreeEntry(b"c", Kind.SYMLINK, target=b"../x"),
    TreeEntry(b"d", Kind.OPAQUE, target=b"too-large"),
)


# --- golden bytes


def test_hashes_are_separated_by_kind() -> None:
    assert {kind: hash_object(kind, b"abc").hex() for kind in ObjectKind} == {
        ObjectKind.BLOB: "f76997240f57ee04b97ec1e894a26c51efdc73ab684134a0e4244f7c53c66a28",
        ObjectKind.CHUNKS: "bb80f49ce02b8b7ae1fb725f4cdc65fe3d33ae8178f90b316cce65e3844fed6e",
        ObjectKind.TREE: "bfb5e4536a18852b371133270e02c526edf293e336db3d9004b4fb1edbb4b092",
    }


def test_tree_bytes() -> None:
    data = trees.encode_tree(ENTRIES)
    assert data.hex() == (
        "9194"
        "9ac40261ff01cd09edcd012cc420" + bytes(range(32)).hex() + "c4009292c406757365722e61c4013192c406757365722e62c400"
        "0700cd03e8"
        "9ac4016202cd01ed00c420" + "00" * 32 + "c4009000ffff"
        "9ac40163030000c400c4042e2e2f789000ffff"
        "9ac40164040000c400c409746f6f2d6c617267659000ffff"
    )
    assert trees.decode_tree(data) == Tree(ENTRIES)
    assert trees.encode_tree([]).hex() == "9190"


def test_chunk_list_bytes() -> None:
    chunks = Chunks(1048579, ((bytes(range(32)), 1048576), (bytes(32), 3)))
    data = trees.encode_chunks(chunks)
    assert (
        data.hex()
        == "92ce00100003" + "92" + "92c420" + bytes(range(32)).hex() + "ce00100000" + "92c420" + ("00" * 32) + "03"
    )
    assert trees.decode_chunks(data) == chunks


def test_pack_header_bytes() -> None:
    assert pack_header(258).hex() == "636f67667300706b" + "01000000" + "02010000" + "f3bf48b1"
    assert len(pack_header(1)) == PACK_HEADER_SIZE == 20
    check_pack_header(pack_header(3), 3)
    with pytest.raises(ValueError, match="header"):
        check_pack_header(pack_header(3), 4)


def test_record_header_bytes() -> None:
    header = record_header(ObjectKind.TREE, codec.Codec.ZSTD, bytes(range(32)), 70000, b"payload", base=b"\x11" * 32)
    assert header.hex() == (
        "636f6752" + "03" + "01" + "0000" + "0700000000000000" + "7011010000000000"
        + bytes(range(32)).hex() + "11" * 32 + zlib.crc32(b"payload").to_bytes(4, "little").hex() + "be7153cf"
    )  # fmt: skip
    assert len(header) == RECORD_HEADER_SIZE == 96
    parsed = parse_record_header(header)
    assert (parsed.kind, parsed.codec, parsed.stored, parsed.raw) == (ObjectKind.TREE, 1, 7, 70000)
    assert (parsed.hash, parsed.base) == (bytes(range(32)), b"\x11" * 32)


def test_index_row_bytes() -> None:
    plain = Location(1, 2, 3, 4, ObjectKind.BLOB, codec.Codec.RAW)
    assert plain.encode().hex() == "01000000" + "0200000000000000" + "0300000000000000" + "0400000000000000" + "0100"
    delta = plain._replace(codec=codec.Codec.ZSTD_DELTA, base=b"\x22" * 32)
    assert delta.encode() == plain.encode()[:-1] + b"\x02" + b"\x22" * 32
    assert Location.decode(plain.encode()) == plain
    assert Location.decode(delta.encode()) == delta


def test_payload_against_a_base() -> None:
    base = b"".join(b"line %d\n" % index for index in range(60))
    frame = bytes.fromhex("28b52ffd0000bd000040616e6f7468657220040060ef4501e70008789c4dad20")
    data = base.replace(b"line 30\n", b"another line\n")
    assert codec.decode(codec.Codec.ZSTD_DELTA, frame, len(data), base) == data


# --- round trips

names = st.binary(min_size=1, max_size=12).filter(lambda name: not re.search(rb"[/\0]|^\.\.?$", name))
hashes = st.binary(min_size=32, max_size=32)
xattrs = st.dictionaries(st.binary(min_size=1, max_size=8), st.binary(max_size=8), max_size=3).map(
    lambda found: tuple(sorted(found.items()))
)
modes = st.integers(0, 0o7777)
owners = st.integers(-1, 2**32 - 2)
entries = st.one_of(
    st.builds(
        TreeEntry, names, st.just(Kind.FILE), modes, st.integers(0, 2**63), hashes, st.just(b""), xattrs,
        st.integers(0, 2**63), owners, owners,
    ),
    st.builds(
        TreeEntry, names, st.just(Kind.DIRECTORY), modes, st.just(0), hashes, st.just(b""), xattrs, st.just(0), owners,
        owners,
    ),
    st.builds(
        TreeEntry, names, st.just(Kind.SYMLINK), target=st.binary(min_size=1).filter(lambda target: b"\0" not in target)
    ),
    st.builds(TreeEntry, names, st.just(Kind.OPAQUE), target=st.sampled_from(OpaqueReason).map(str.encode)),
)  # fmt: skip


@given(st.lists(entries, unique_by=lambda entry: entry.name))
def test_trees_round_trip(found: list[TreeEntry]) -> None:
    found.sort(key=lambda entry: entry.name)
    data = trees.encode_tree(found)
    assert trees.decode_tree(data) == Tree(tuple(found))
    assert trees.encode_tree(trees.decode_tree(data).entries) == data


@given(st.binary(max_size=3000), st.integers(1, 40))
def test_payloads_round_trip(data: bytes, times: int) -> None:
    used, payload = codec.encode(data * times)
    assert codec.decode(used, bytes(payload), len(data) * times) == data * times
    assert len(payload) <= len(data) * times


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoders_fail_otherwise(data: bytes) -> None:
    for decode in (trees.decode_tree, trees.decode_chunks, parse_record_header, Location.decode):
        try:
            decode(data)
        except ValueError:
            pass


@pytest.mark.parametrize(
    "wrong",
    [
        [TreeEntry(b"b", Kind.SYMLINK, target=b"x"), TreeEntry(b"a", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"a", Kind.SYMLINK, target=b"x"), TreeEntry(b"a", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b".", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"..", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"a/b", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"a\0", Kind.SYMLINK, target=b"x")],
        [TreeEntry(b"a", Kind.SYMLINK)],
        [TreeEntry(b"a", Kind.SYMLINK, mode=0o777, target=b"x")],
        [TreeEntry(b"a", Kind.FILE)],
        [TreeEntry(b"a", Kind.FILE, hash=bytes(31))],
        [TreeEntry(b"a", Kind.FILE, hash=bytes(32), size=-1)],
        [TreeEntry(b"a", Kind.FILE, hash=bytes(32), mode=0o100644)],
        [TreeEntry(b"a", Kind.FILE, hash=bytes(32), target=b"x")],
        [TreeEntry(b"a", Kind.FILE, hash=bytes(32), xattrs=((b"b", b""), (b"a", b"")))],
        [TreeEntry(b"a", Kind.DIRECTORY, hash=bytes(32), size=1)],
        [TreeEntry(b"a", Kind.OPAQUE, target=b"because")],
    ],
)
def test_invalid_trees_are_refused(store: Store, wrong: list[TreeEntry]) -> None:
    with pytest.raises(ValueError, match=r"."):
        store.put_tree(wrong)
    assert store.stats().objects == 0


# --- damage


def pack_of(place: Path, number: int = 1) -> Path:
    return place / "packs" / f"{number:08x}.pack"


def contents(tag: str) -> list[bytes]:
    return [f"{tag} {index} ".encode() * (5 + index * 7) for index in range(4)]


def test_a_torn_tail_is_cut_off_wherever_it_tears(place: Path) -> None:
    kept = contents("kept")
    with Store.open(place) as store:
        names = [store.put_blob(data) for data in kept]
        store.sync()
        good = pack_of(place).read_bytes()
        lost = store.put_blob(b"never committed " * 9)
    whole = pack_of(place).read_bytes()
    assert whole.startswith(good)
    assert len(whole) > len(good) + RECORD_HEADER_SIZE
    for length in range(len(good), len(whole)):
        pack_of(place).write_bytes(whole[:length])
        with Store.open(place) as store:
            assert pack_of(place).read_bytes() == good
            assert store.recovered == Recovered(dropped=length - len(good))
            assert not store.has(lost)
            assert [store.read_blob(name) for name in names] == kept
    pack_of(place).write_bytes(whole)
    with Store.open(place) as store:
        assert store.recovered == Recovered(1, len(whole) - len(good))
        assert store.read_blob(lost) == b"never committed " * 9


def test_a_scan_finds_all_records_and_stops_at_a_torn_one(tmp_path: Path) -> None:
    packs = Packs(tmp_path)
    where = []
    for data in contents("scan"):
        header = record_header(ObjectKind.BLOB, codec.Codec.RAW, hash_object(ObjectKind.BLOB, data), len(data), data)
        where.append(packs.append(header, data)[1])
    assert [offset for offset, _ in packs.scan(1)] == where
    path = tmp_path / "00000001.pack"
    whole = path.read_bytes()
    for length in range(where[-1] + 1, len(whole)):
        path.write_bytes(whole[:length])
        found: list[int] = []
        with pytest.raises(Corrupt):
            found.extend(offset for offset, _ in packs.scan(1))
        scan = packs.scan(1)
        assert [next(scan)[0] for _ in where[:-1]] == where[:-1]
        with pytest.raises(Corrupt):
            next(scan)
    packs.close()


@pytest.mark.parametrize("compressible", [True, False])
def test_no_flipped_byte_gives_wrong_data(place: Path, compressible: bool) -> None:
    before = b"before " * 30
    data = b"flipped " * 40 if compressible else bytes(range(256))
    with Store.open(place) as store:
        first = store.put_blob(before)
        store.sync()
        start = pack_of(place).stat().st_size
        name = store.put_blob(data)
        store.sync()
        end = pack_of(place).stat().st_size
        with pack_of(place).open("r+b") as file:
            whole = file.read()
            for offset in range(start, end):
                for flipped in (whole[offset] ^ 0xFF, whole[offset] ^ 1):
                    file.seek(offset)
                    file.write(bytes([flipped]))
                    file.flush()
                    try:
                        assert store.read_blob(name) == data
                        # What does not matter for the content is found by a scan.
                    except Corrupt as error:
                        assert error.object_hash == name
                        assert name.hex() in str(error)
                    else:
                        assert offset < start + RECORD_HEADER_SIZE or compressible
                    with pytest.raises(Corrupt):
                        list(store._packs.scan(1))
                    assert store.read_blob(first) == before
                file.seek(offset)
                file.write(whole[offset : offset + 1])
                file.flush()
        assert store.read_blob(name) == data
        assert len(list(store._packs.scan(1))) == 2


def test_damage_to_a_piece_and_to_a_tree_is_named(place: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"".join(bytes([index]) * 1000 + index.to_bytes(8) * 900 for index in range(256)) * 3)
    with Store.open(place) as store, large.open("rb") as file:
        name, size = store.put_file(file.fileno(), 0)
        assert size > 4 * 1024 * 1024
        tree = store.put_tree([TreeEntry(b"large", Kind.FILE, size=size, hash=name)])
        store.sync()
    with Store.open(place) as store:
        (piece, *_), location = store._read_chunks(name).pieces[2], store._objects.locate(tree)
        where = store._objects.locate(piece)
        with pack_of(place).open("r+b") as pack:
            for spot in (where.offset + RECORD_HEADER_SIZE + 30, location.offset + RECORD_HEADER_SIZE + 12):
                pack.seek(spot)
                byte = pack.read(1)
                pack.seek(spot)
                pack.write(bytes([byte[0] ^ 0x55]))
        reading = store.read_file(name)
        next(reading)
        next(reading)
        with pytest.raises(Corrupt) as caught:
            next(reading)
        assert caught.value.object_hash == piece
        with pytest.raises(Corrupt) as caught:
            store.verify_file(name)
        assert caught.value.object_hash == piece
        with pytest.raises(Corrupt) as caught:
            store.read_tree(tree)
        assert caught.value.object_hash == tree


def test_a_missing_or_short_pack_is_reported_and_the_rest_works(place: Path) -> None:
    with Store.open(place, pack_limit=1000) as store:
        names = [store.put_blob(os.urandom(600)) for _ in range(3)]
        store.sync()
        assert store.stats().packs == 3
    pack_of(place, 1).unlink()
    whole = pack_of(place, 3).read_bytes()
    pack_of(place, 3).write_bytes(whole[:-1])
    with Store.open(place, pack_limit=10000) as store:
        for name in (names[0], names[2]):
            with pytest.raises(Corrupt) as caught:
                store.read_blob(name)
            assert caught.value.object_hash == name
        assert store.read_blob(names[1])
        # The short pack does not grow: a new one is begun.
        fresh = store.put_blob(b"fresh" * 20)
        store.sync()
        assert pack_of(place, 4).exists()
        assert pack_of(place, 3).read_bytes() == whole[:-1]
    with Store.open(place) as store:
        assert store.read_blob(fresh) == b"fresh" * 20
        with pytest.raises(NotFound):
            store.read_blob(bytes(32))


def test_group_bytes(place: Path) -> None:
    """A group of two frames, of which the second one needs the first."""
    first, second, third = (
        b"the first one of the head\n" * 3,
        b"the second of it\n",
        b"the first one of the head\n" * 2 + b"!",
    )
    names = [hash_object(ObjectKind.BLOB, data) for data in (first, second, third)]
    payload = bytes.fromhex(_GROUP)
    assert groups.members(payload) == [
        groups.Member(names[0], 0, 78),
        groups.Member(names[1], 78, 17),
        groups.Member(names[2], 95, 53),
    ]
    assert groups.decode(payload) == first + second + third
    assert groups.wrong(ObjectKind.BLOB, payload) == ""
    with Store.open(place) as store:
        store._objects.regroup(ObjectKind.BLOB, payload)
        assert [store.read_blob(name) for name in names] == [first, second, third]
        at = store._objects.locate(names[2])
        assert (
            at.encode().hex() == "0100000014000000" + f"{len(payload):02x}000000" + "350000005f000000" + _SHARE + "01"
        )
        assert Location.decode(at.encode()) == at
        shares = [store._objects.locate(name).share for name in names]
        assert sum(shares) == RECORD_HEADER_SIZE + len(payload)
    for cut in range(0, len(payload), 7):
        assert groups.wrong(ObjectKind.BLOB, payload[:cut])
    with pytest.raises(ValueError, match="unknown form"):
        groups.members(payload + b"\0")


_GROUP = (
    "0300000002000000310000005f000000120000003500000028b52ffd000045010072c2070bd03dd2b664661740c14b63b06642cfa15c61"
    "e2e5d79ad03ff46a1af9b5010100b6cf390628b52ffd00004d0000107421010010cf2004c19762b43f07f95830e3801f59ba1ba41dc2e6"
    "75d4ae8570c3a8efbe5107652e4e0000003f6c50192e6497da76a86589925902004fa979750b77f9ee62da8e66a7b4cf13110000008c90"
    "70adc6dbf8b0899a38d97201b7661dea846aef036a0f9c23606ba229e04a35000000"
)
_SHARE = "67000000"
