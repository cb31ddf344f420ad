"""Where a store may be, who may open it, and what its files look like to others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cogfs.store import place as place_module
from cogfs.store.errors import Corrupt, Locked, NetworkFilesystem, StoreIO, Unsafe, UnsupportedFormat
from cogfs.store.schema import FORMAT_VERSION
from cogfs.store.store import Store

PROGRAM = Path(__file__).with_name("store_program.py")


def use(path: Path) -> None:
    with Store.open(path) as store:
        store.put_blob(b"some" * 100)
        store.sync()


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_only_the_owner_can_enter_whatever_the_umask(place: Path, mask: int) -> None:
    place.parent.parent.chmod(0o755)
    before = os.umask(mask)
    try:
        use(place)
    finally:
        os.umask(before)
    found = [place.parent, place, *place.rglob("*")]
    assert {path.name for path in found} >= {"state", "store", "packs", "index", "lock", "data.mdb", "00000001.pack"}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    use(place)


def test_a_place_that_is_open_to_others_is_closed_to_them(place: Path) -> None:
    place.mkdir(parents=True)
    place.chmod(0o755)
    use(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_one_process_at_a_time(place: Path) -> None:
    with Store.open(place), pytest.raises(Locked, match="another process"):
        Store.open(place)
    holder = subprocess.Popen(
        [sys.executable, str(PROGRAM), "hold", str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"open\n"
    with pytest.raises(Locked):
        Store.open(place)
    holder.kill()
    holder.wait(180)
    holder.stdin.close()
    holder.stdout.close()
    use(place)


def test_symlinks_and_other_things_are_refused(place: Path, tmp_path: Path) -> None:
    use(place)
    link = tmp_path / "link"
    link.symlink_to(place)
    with pytest.raises(Unsafe, match="symlink"):
        Store.open(link)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(Unsafe, match="symlink"):
        Store.open(link)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(Unsafe, match="not a directory"):
        Store.open(file)
    with pytest.raises((Unsafe, StoreIO)):
        Store.open(file / "below")
    assert file.read_bytes() == b""


@pytest.mark.parametrize("name", ["lock", "format", "index", "packs", "index/data.mdb", "index/lock.mdb"])
def test_no_symlink_is_followed_inside(place: Path, tmp_path: Path, name: str) -> None:
    use(place)
    victim = tmp_path / "victim"
    (place / name).rename(victim)
    (place / name).symlink_to(victim)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in [victim, *victim.parent.iterdir()])
    with pytest.raises((Unsafe, StoreIO)):
        Store.open(place)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in [victim, *victim.parent.iterdir()]) == before
    (place / name).unlink()
    victim.rename(place / name)
    use(place)


def test_a_place_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        other = tmp_path / "other"
        other.mkdir()
        os.chown(other, 65534, 65534)
    else:
        other = Path("/usr")
    with pytest.raises(Unsafe, match="another user"):
        Store.open(other)
    assert "lock" not in os.listdir(other)


def test_a_newer_format_is_refused_and_not_touched(place: Path) -> None:
    use(place)
    (place / "format").write_text(f"cogfs store {FORMAT_VERSION + 1}\n")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(UnsupportedFormat, match=f"format {FORMAT_VERSION + 1}"):
        Store.open(place)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    (place / "format").write_text("nonsense")
    with pytest.raises(UnsupportedFormat):
        Store.open(place)
    (place / "format").write_text(f"cogfs store {FORMAT_VERSION}\n")
    use(place)


def test_a_lost_index_is_reported_and_the_packs_stay(place: Path) -> None:
    use(place)
    pack = (place / "packs" / "00000001.pack").read_bytes()
    (place / "index" / "data.mdb").unlink()
    for _ in range(2):
        with pytest.raises(Corrupt, match="index"):
            Store.open(place)
    assert (place / "packs" / "00000001.pack").read_bytes() == pack


def test_a_damaged_index_is_reported(place: Path) -> None:
    use(place)
    (place / "index" / "data.mdb").write_bytes(b"nonsense" * 4096)
    with pytest.raises(Corrupt, match="index"):
        Store.open(place)


def test_network_filesystems_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's own number for one that is always there.
    assert place_module.filesystem_type(Path("/proc")) == 0x9FA0
    place.parent.mkdir()
    here = place_module.filesystem_type(place.parent)
    monkeypatch.setitem(place_module._REFUSED, here, "NFS")
    with pytest.raises(NetworkFilesystem, match="NFS"):
        Store.open(place)
    assert not place.exists()


def test_temporary_files_are_removed(place: Path) -> None:
    use(place)
    (place / "format.new").write_bytes(b"left behind")
    use(place)
    assert not (place / "format.new").exists()
