"""What cannot be done is refused with one sentence, the right reason and exit code; and nothing has changed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogfs.client import Client, CogfsError, Corrupt, IOFailed, NoSpace, Unavailable
from cogfs.v1 import workspace_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.support.disks import fill, mounted
from tests.e2e.support.site import Outcome, Site, as_root, mounts_below, site
from tests.support.tree import describe, differences, of_snapshot


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    """A daemon that only refuses, with one workspace that is mounted."""
    with site() as place:
        (place.project / "a").write_text("a\n")
        home = place.base / "home"
        home.mkdir()
        place.environ["HOME"] = str(home)
        place.mount()
        with place.client() as cog:
            thread = cog.create_thread("chat", workspace=place.workspace(cog))
            thread.user_message("one", id="m1")
        yield place


def refused(outcome: Outcome, *reasons: Reason) -> str:
    """The sentence of a refusal, which is one, and for one of these reasons."""
    assert outcome.code in {reason.exit_code for reason in reasons}, outcome
    assert not outcome.out, outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("cogfsctl: "), outcome
    assert "Traceback" not in line and "internal error" not in line, outcome
    return line.removeprefix("cogfsctl: ")


# --- roots ------------------------------------------------------------------------------------------------------------


def _missing(here: Site) -> Path:
    return here.base / "missing"


def _file(here: Site) -> Path:
    path = here.base / "file"
    path.touch()
    return path


def _loop(here: Site) -> Path:
    path = here.base / "loop"
    if not path.is_symlink():
        path.symlink_to(path)
    return path


def _new(name: str) -> Callable[[Site], Path]:
    def make(here: Site) -> Path:
        path = here.base / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    return make


@pytest.mark.parametrize(
    ("root", "reason", "says"),
    [
        (_missing, Reason.VALIDATION_ERROR, "does not exist"),
        (_file, Reason.VALIDATION_ERROR, "not a directory"),
        (lambda here: _file(here) / "below", Reason.VALIDATION_ERROR, "not a directory"),
        (_loop, Reason.VALIDATION_ERROR, "loop"),
        (lambda here: Path("/"), Reason.VALIDATION_ERROR, "--force-root"),
        (lambda here: here.base / "home", Reason.VALIDATION_ERROR, "--force-root"),
        (lambda here: Path(pwd.getpwuid(os.geteuid()).pw_dir), Reason.VALIDATION_ERROR, "--force-root"),
        (lambda here: Path("/proc/self"), Reason.VALIDATION_ERROR, "proc"),
        (lambda here: here.project, Reason.ALREADY_EXISTS, "mounted already"),
        (_new("project/inside"), Reason.VALIDATION_ERROR, "mount of cogfs"),
        (lambda here: here.base, Reason.VALIDATION_ERROR, "holds the workspace"),
        (lambda here: here.state, Reason.VALIDATION_ERROR, "own files"),
        (lambda here: here.state / "store" / "packs", Reason.VALIDATION_ERROR, "own files"),
        (lambda here: here.runtime, Reason.VALIDATION_ERROR, "own files"),
    ],
)
def test_roots(shared: Site, root: Callable[[Site], Path], reason: Reason, says: str) -> None:
    path = root(shared)

    def standing() -> object:
        with shared.client() as cog:
            return [workspace.message for workspace in cog.workspaces()], mounts_below(shared.base)

    before = standing()
    sentence = refused(shared.ctl("mount", path, code=None), reason)
    assert says in sentence
    assert standing() == before


def test_roots_that_meet_a_workspace_which_is_not_mounted(here: Site) -> None:
    root = here.project / "mid"
    (root / "inner").mkdir(parents=True)
    here.mount(root)
    here.ctl("unmount", root)
    assert "lies in the workspace" in refused(here.ctl("mount", root / "inner", code=None), Reason.VALIDATION_ERROR)
    assert "holds the workspace" in refused(here.ctl("mount", here.project, code=None), Reason.VALIDATION_ERROR)
    assert "not mounted" in refused(here.ctl("unmount", root, code=None), Reason.VALIDATION_ERROR)
    # A daemon whose store would lie in the directory.
    other = here.base / "other"
    here.environ["COGFS_STATE_DIR"] = str(other / "deep" / "state")
    here.environ["COGFS_RUNTIME_DIR"] = str(here.base / "run2")
    try:
        assert "own files" in refused(here.ctl("mount", other, code=None), Reason.VALIDATION_ERROR)
        assert not mounts_below(here.base)
    finally:
        here.ctl("daemon", "stop")
        here.environ["COGFS_STATE_DIR"] = str(here.state)
        here.environ["COGFS_RUNTIME_DIR"] = str(here.runtime)


# --- the device and permissions ---------------------------------------------------------------------------------------

_NOBODY = 65534

#: A mount namespace with a /dev of its own: the usual devices without fuse.
_WITHOUT_FUSE = (
    'mkdir "$0/dev"; mount -t tmpfs -o mode=755 dev "$0/dev"; for n in null zero full random urandom; do '
    ': > "$0/dev/$n"; mount --bind "/dev/$n" "$0/dev/$n"; done; ln -s /proc/self/fd "$0/dev/fd"; '
    'mkdir "$0/dev/shm"; mount --move "$0/dev" /dev; exec "$@"'
)
#: The same machine with a /dev/fuse for root alone.
_CLOSED_FUSE = ': > "$0/closed"; chmod 600 "$0/closed"; mount --bind "$0/closed" /dev/fuse; exec "$@"'


@pytest.fixture
def on_disk() -> Iterator[Site]:
    """Not in /dev/shm, which a /dev of its own would hide."""
    place = Site(Path(tempfile.mkdtemp(prefix="cogfs-e2e-")))
    place.base.chmod(0o755)
    place.environ.setdefault("HOME", str(place.base))
    try:
        yield place
    finally:
        place.prefix = ()
        place.close()


def test_no_device(on_disk: Site) -> None:
    ourselves = on_disk.prefix_as(os.geteuid(), os.getegid())
    on_disk.prefix = (*as_root(), "unshare", "-m", "sh", "-ec", _WITHOUT_FUSE, str(on_disk.base), *ourselves)
    on_disk.ctl("daemon", "start")
    on_disk.prefix = ()
    on_disk.daemon_pid()
    sentence = refused(on_disk.ctl("mount", on_disk.project, code=None), Reason.UNAVAILABLE)
    assert "/dev/fuse" in sentence and "modprobe" in sentence
    assert on_disk.json("workspaces")["workspaces"] == []
    assert not mounts_below(on_disk.base)


def test_no_permission(on_disk: Site) -> None:
    places = [on_disk.state, on_disk.runtime, on_disk.project]
    for path in places:
        path.mkdir(exist_ok=True)
    secret = on_disk.base / "secret"
    secret.mkdir(mode=0o700)
    subprocess.run([*as_root(), "chown", str(_NOBODY), *map(str, places)], check=True, timeout=180)
    on_disk.environ["HOME"] = str(on_disk.state)
    as_user = on_disk.prefix_as(_NOBODY, _NOBODY)
    on_disk.prefix = (*as_root(), "unshare", "-m", "sh", "-ec", _CLOSED_FUSE, str(on_disk.base), *as_user)
    on_disk.ctl("daemon", "start")
    on_disk.prefix = (*as_root(), *as_user)
    sentence = refused(on_disk.ctl("mount", on_disk.project, code=None), Reason.UNAVAILABLE)
    assert "/dev/fuse" in sentence and "permission" in sentence
    assert "secret" in refused(on_disk.ctl("mount", secret, code=None), Reason.DENIED)
    assert on_disk.json("workspaces")["workspaces"] == []
    assert not mounts_below(on_disk.base)
    on_disk.ctl("daemon", "stop")


# --- ids and values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("show snap_01m8q1p18t4gqee9bzt8scskks", Reason.NOT_FOUND),
        ("show nonsense", Reason.NOT_FOUND),
        ("show ../../etc/passwd", Reason.VALIDATION_ERROR),
        ("diff snap_01m8q1p18t4gqee9bzt8scskks", Reason.NOT_FOUND),
        ("restore snap_01m8q1p18t4gqee9bzt8scskks --yes", Reason.NOT_FOUND),
        ("log nobody", Reason.NOT_FOUND),
        ("message nobody hello", Reason.NOT_FOUND),
        ("rewind chat nothing --yes", Reason.NOT_FOUND),
        ("rewind nobody m1 --yes", Reason.NOT_FOUND),
        ("message chat hello --id m1", Reason.ALREADY_EXISTS),
        ("message chat hello --id a/b", Reason.VALIDATION_ERROR),
        ("thread new chat", Reason.ALREADY_EXISTS),
        ("thread new a\tb", Reason.VALIDATION_ERROR),
        ("fork nobody m1", Reason.NOT_FOUND),
        ("fork chat nothing", Reason.NOT_FOUND),
        ("fork chat m1 --thread chat", Reason.VALIDATION_ERROR),
        ("fork chat m1 --thread a/b", Reason.VALIDATION_ERROR),
        ("fork chat m1 --thread chat --files --into BASE/new --yes", Reason.VALIDATION_ERROR),
        ("fork chat m1 --files --into PROJECT/inside --yes", Reason.VALIDATION_ERROR),
        ("fork chat m1 --files --into BASE --yes", Reason.VALIDATION_ERROR),
        ("fork chat m1 --files --into BASE/state --yes", Reason.VALIDATION_ERROR),
        ("fork chat m1 --files --into BASE/no/where --yes", Reason.VALIDATION_ERROR),
        ("fork chat m1 --files --into / --dry-run", Reason.VALIDATION_ERROR),
        ("undo PROJECT --yes", Reason.VALIDATION_ERROR),
        ("status /", Reason.NOT_FOUND),
        ("unmount /nowhere", Reason.NOT_FOUND),
        ("checkpoint /nowhere", Reason.NOT_FOUND),
        ("cat SNAPSHOT missing", Reason.NOT_FOUND),
        ("cat SNAPSHOT ../a", Reason.VALIDATION_ERROR),
        ("ls SNAPSHOT /etc", Reason.VALIDATION_ERROR),
        ("restore SNAPSHOT ../a --yes", Reason.VALIDATION_ERROR),
        ("restore SNAPSHOT a/../../a --yes", Reason.VALIDATION_ERROR),
        ("restore SNAPSHOT missing --yes", Reason.NOT_FOUND),
        (f"restore SNAPSHOT {'n' * 300} --yes", Reason.NOT_FOUND),
    ],
)
def test_ids_and_paths(shared: Site, words: str, reason: Reason) -> None:
    def standing() -> object:
        with shared.client() as cog:
            return (
                describe(shared.project),
                [thread.message for thread in cog.threads()],
                list(cog.thread("chat").entries(all_branches=True)),
                shared.workspace(cog).message.snapshot_count,
            )

    with shared.client() as cog:
        snapshot = next(shared.workspace(cog).snapshots()).id
    before = standing()
    # Spaces separate the words here, and nothing else does.
    known = {"PROJECT": str(shared.project), "SNAPSHOT": snapshot, "BASE": str(shared.base)}
    arguments = [
        "/".join([known.get(first, first), *rest]) for first, *rest in (word.split("/") for word in words.split(" "))
    ]
    refused(shared.ctl(*arguments, code=None), reason)
    assert standing() == before


def test_values_of_the_api(shared: Site) -> None:
    """What a client that is not ours could send."""
    with shared.client() as cog:
        workspace, thread = shared.workspace(cog), cog.thread("chat")
        calls: list[tuple[Callable[[], object], Reason]] = [
            (lambda: cog.snapshot(""), Reason.VALIDATION_ERROR),
            (lambda: cog.thread(""), Reason.VALIDATION_ERROR),
            (lambda: cog.thread("x" * 129), Reason.VALIDATION_ERROR),
            (lambda: cog.workspace(id="ws_01m8q1nzxrxmr0yes2bf1qp6s0"), Reason.NOT_FOUND),
            (lambda: cog.create_thread("n", workspace="ws_nothing"), Reason.NOT_FOUND),
            (lambda: thread.rewind("", files=True), Reason.VALIDATION_ERROR),
            (lambda: thread.rewind("m1", memory=False), Reason.VALIDATION_ERROR),
            (lambda: thread.entry("m1\0"), Reason.VALIDATION_ERROR),
            (lambda: workspace.checkpoint("l" * 5000), Reason.VALIDATION_ERROR),
            (lambda: workspace.restore("snap_nothing"), Reason.NOT_FOUND),
            (lambda: cog.mount(shared.base / "home2", exclude=[""]), Reason.VALIDATION_ERROR),
            (lambda: cog.mount(b"/nul\0"), Reason.VALIDATION_ERROR),
            (lambda: cog.mount(b"/" + b"n" * 5000), Reason.VALIDATION_ERROR),
        ]
        (shared.base / "home2").mkdir(exist_ok=True)
        before = cog.thread("chat").message, len(cog.workspaces())
        for number, (call, reason) in enumerate(calls):
            with pytest.raises(CogfsError) as caught:
                call()
            assert caught.value.reason is reason, (number, caught.value)
            assert "\n" not in str(caught.value) and "internal" not in str(caught.value)
        assert (cog.thread("chat").message, len(cog.workspaces())) == before


# --- full disks -------------------------------------------------------------------------------------------------------


def test_a_store_on_a_full_disk(here: Site) -> None:
    with mounted(here.state, "-t", "tmpfs", "-o", "size=48m", "tmpfs"):
        for number in range(30):
            (here.project / f"f{number}").write_bytes(os.urandom(10_000))
        here.mount()
        with here.client() as cog:
            thread = cog.create_thread("chat", workspace=here.workspace(cog))
            first = thread.user_message("one").file_checkpoint.snapshot_id
            before = describe(here.project)
            refusals = 0
            for leave in (0, 4096, 16384, 65536, 200_000, 400_000, 2_000_000):
                for number in range(30):
                    (here.project / f"f{number}").write_bytes(os.urandom(10_000))
                after = describe(here.project)
                ballast = fill(here.state, leave)
                refusals += _message_on_full_disk(here, cog, leave)
                assert not differences(describe(here.project), after)
                refusals += _restore_on_full_disk(here, cog, first)
                restored = not differences(describe(here.project), before)
                assert restored or not differences(describe(here.project), after)
                # Whatever came of it, the workspace can be worked in.
                (here.project / "f3").write_bytes(b"free")
                ballast.unlink()
                # There is room again, and all is well.
                entry = thread.user_message("again", require_checkpoint=True)
                taken = of_snapshot(cog.snapshot(entry.file_checkpoint.snapshot_id))
                assert not differences(taken, describe(here.project), [b""])
                here.workspace(cog).restore(first)
                assert not differences(describe(here.project), before)
            assert refusals >= 4
        # It can be stopped and started.
        here.ctl("daemon", "stop")
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            here.settled(cog)
        here.ctl("daemon", "stop")


def _message_on_full_disk(here: Site, cog: Client, leave: int) -> bool:
    """The message is saved, with its checkpoint or with why not, or it is refused. Whether space was missing."""
    thread = cog.thread("chat")
    ids = [entry.id for entry in thread.entries()]
    try:
        answer = thread.append_entry("user", "full", id=f"full{leave}")
    except NoSpace:
        assert [entry.id for entry in thread.entries()] == ids
        assert cog.thread("chat").message.leaf_id == ids[-1]
        return True
    assert [entry.id for entry in thread.entries()] == [*ids, f"full{leave}"]
    assert bool(answer.checkpoint_error) != answer.entry.HasField("file_checkpoint")
    return bool(answer.checkpoint_error)


def _restore_on_full_disk(here: Site, cog: Client, snapshot: str) -> bool:
    before = describe(here.project)
    try:
        here.workspace(cog).restore(snapshot)
    except NoSpace:
        assert not differences(describe(here.project), before)
        assert here.settled(cog).state == workspace_pb2.Workspace.ACTIVE
        return True
    return False


def _full_workspace(here: Site, cog: Client) -> str:
    """A workspace that has no room for the snapshot whose id is returned."""
    for number in range(40):
        (here.project / f"d{number % 4}").mkdir(exist_ok=True)
        (here.project / f"d{number % 4}" / f"f{number}").write_bytes(os.urandom(60_000))
    snapshot = here.workspace(cog).checkpoint().id
    shutil.rmtree(here.project / "d1")
    for number in range(40):
        path = here.project / f"d{number % 4}" / f"f{number}"
        if number % 4 == 0:
            path.write_text("short now\n")
        elif number % 4 == 2:
            path.unlink()
            path.symlink_to("elsewhere")
        elif number % 4 == 3:
            path.chmod(0o600)
    (here.project / "node_modules").mkdir()
    fill(here.project / "node_modules", 400_000)
    return snapshot


def test_a_restore_on_a_full_workspace(here: Site) -> None:
    with mounted(here.project, "-t", "tmpfs", "-o", "size=6m", "tmpfs"):
        here.mount()
        with here.client() as cog:
            snapshot = _full_workspace(here, cog)
            before = describe(here.project)
            sentence = refused(here.ctl("restore", snapshot, "--yes", code=None), Reason.NO_SPACE)
            assert "as they were" in sentence
            assert not differences(describe(here.project), before), here.log_tail()
            assert here.settled(cog).state == workspace_pb2.Workspace.ACTIVE
            (here.project / "d0" / "f0").write_text("tiny\n")
            (here.project / "d0" / "f0").write_text("short now\n")
            (here.project / "node_modules" / "ballast").unlink()
            here.workspace(cog).restore(snapshot)
            assert not differences(of_snapshot(cog.snapshot(snapshot)), describe(here.project), [b""])
        here.ctl("daemon", "stop")


@pytest.mark.parametrize("scan", [False, True], ids=["mounted", "scanned"])
def test_a_restore_gives_room_back_before_it_needs_it(here: Site, scan: bool) -> None:
    """Each file is written beside the old one, and of all orders in which they can be one is enough."""
    large, small = 4 << 20, 10
    snapshot_has = {"a": large, "b": large, "c": 0, "d": 2 * small, "e": small, "f": small}
    now_has = {"a": small, "b": 0, "c": large, "d": large, "e": large, "f": 0}
    with mounted(here.project, "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        for name, size in snapshot_has.items():
            if size:
                (here.project / name).write_bytes(os.urandom(size))
        here.ctl("mount", here.project, *(["--scan"] if scan else []))
        here.daemon_pid()
        with here.client() as cog:
            snapshot = here.workspace(cog).checkpoint(wait_for="sealed")
            for name, size in now_has.items():
                (here.project / name).unlink(missing_ok=True)
                if size:
                    (here.project / name).write_bytes(os.urandom(size))
            (here.project / "node_modules").mkdir()
            fill(here.project / "node_modules", 400_000)
            here.workspace(cog).restore(snapshot.id)
            assert not differences(of_snapshot(snapshot), describe(here.project), [b""])
            here.workspace(cog).undo()
            assert {name for name, size in now_has.items() if size} < set(os.listdir(here.project))
        here.ctl("daemon", "stop")


def test_a_recovery_on_a_full_workspace_goes_back(here: Site) -> None:
    with mounted(here.project, "-t", "tmpfs", "-o", "size=6m", "tmpfs"):
        here.mount()
        with here.client() as cog:
            snapshot = _full_workspace(here, cog)
        before = describe(here.project)
        here.kill_daemon()
        here.start("restore.write:5")
        with here.client() as cog, pytest.raises(Unavailable):
            here.workspace(cog).restore(snapshot)
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            recovery = here.settled(cog).last_recovery
            assert recovery.outcome == workspace_pb2.Recovery.BACK
            assert "space" in recovery.reason
            assert not differences(describe(here.project), before), here.log_tail()
        here.ctl("daemon", "stop")


def test_what_can_be_neither_finished_nor_taken_back_is_read_only_until_it_can(here: Site) -> None:
    with mounted(here.base / "disk", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as disk:
        here.project = disk / "project"
        here.project.mkdir()
        here.mount()
        with here.client() as cog:
            snapshot = _full_workspace(here, cog)
        before = describe(here.project)
        here.kill_daemon()
        here.start("restore.write:5")
        with here.client() as cog, pytest.raises(Unavailable):
            here.workspace(cog).restore(snapshot)
        ballast = fill(disk)
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            message = here.workspace(cog).message
            assert message.state == workspace_pb2.Workspace.READ_ONLY
            assert message.last_recovery.outcome == workspace_pb2.Recovery.FAILED
            assert "space" in message.reason
            with pytest.raises(OSError, match="Read-only"):
                (here.project / "d0" / "mine").write_text("x")
            # It can be read all the same.
            assert describe(here.project)
            for call in (here.workspace(cog).checkpoint, lambda: here.workspace(cog).restore(snapshot)):
                with pytest.raises(CogfsError, match="read-only"):
                    call()
            ballast.unlink()
            here.ctl("mount", here.project)
            recovery = here.settled(cog).last_recovery
            assert recovery.outcome == workspace_pb2.Recovery.BACK
            assert not differences(describe(here.project), before), here.log_tail()
            here.workspace(cog).checkpoint()
        here.ctl("daemon", "stop")


# --- a damaged store --------------------------------------------------------------------------------------------------


def test_a_damaged_pack(here: Site) -> None:
    content = os.urandom(50_000)
    (here.project / "precious").write_bytes(content)
    (here.project / "other").write_text("one\n")
    here.mount()
    with here.client() as cog:
        snapshot = here.workspace(cog).checkpoint(wait_for="sealed").id
        (here.project / "precious").write_bytes(b"changed")
        (here.project / "other").write_text("two\n")
        (here.project / "more").write_text("three\n")
        before = describe(here.project)
        packs = [path for path in (here.state / "store" / "packs").iterdir() if content[:500] in path.read_bytes()]
        (pack,) = packs
        at = pack.read_bytes().index(content[:500]) + 250
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[250] ^ 0xFF]))
        inodes = {path.name: path.stat().st_ino for path in here.project.iterdir()}
        refused(here.ctl("restore", snapshot, "--yes", code=None), Reason.IO)
        assert not differences(describe(here.project), before)
        assert {path.name: path.stat().st_ino for path in here.project.iterdir()} == inodes
        with pytest.raises((Corrupt, IOFailed)):
            b"".join(cog.snapshot(snapshot).cat("precious"))
        # It did not begin, so there is nothing to undo; the rest of the snapshot can be had.
        assert here.settled(cog).state == workspace_pb2.Workspace.ACTIVE
        with pytest.raises(CogfsError, match="no restore"):
            here.workspace(cog).undo()
        here.workspace(cog).restore(snapshot, ["other"])
        assert (here.project / "other").read_text() == "one\n"
        assert (here.project / "precious").read_bytes() == b"changed"


def test_a_damaged_tree(here: Site) -> None:
    """The listing of a directory, in the pack; the daemon is another one, which has read nothing yet."""
    name = "only-in-the-first-snapshot"
    (here.project / name).write_text("one\n")
    here.mount()
    with here.client() as cog:
        snapshot = here.workspace(cog).checkpoint().id
        (here.project / name).rename(here.project / "other")
        here.workspace(cog).checkpoint()
    before = describe(here.project)
    here.kill_daemon()
    packs = (here.state / "store" / "packs").iterdir()
    (pack,) = (path for path in packs if name.encode() in path.read_bytes())
    with pack.open("r+b") as file:
        file.seek(pack.read_bytes().index(name.encode()) + 5)
        file.write(b"X")
    here.ctl("status", here.project)
    here.daemon_pid()
    for arguments in (("restore", snapshot, "--yes"), ("ls", snapshot), ("diff", snapshot)):
        refused(here.ctl(*arguments, code=None), Reason.CORRUPT, Reason.IO)
    assert not differences(describe(here.project), before)
    with here.client() as cog:
        assert here.settled(cog).state == workspace_pb2.Workspace.ACTIVE
        (here.project / "other").write_text("goes on\n")
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), describe(here.project), [b""])
