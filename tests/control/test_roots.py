"""Directories that cannot be workspaces: one sentence each, the right reason, and nothing changed."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from cogfs.v1 import workspace_pb2
from cogfs.v1.reasons import Reason
from tests.control.harness import Daemon, cogfs_mounts, processes, refused

CREATE = workspace_pb2.CreateWorkspaceRequest
MOUNT = workspace_pb2.MountRequest


def all_of(daemon: Daemon) -> list[bytes]:
    return [row.root for row in daemon.workspaces.ListWorkspaces(workspace_pb2.ListWorkspacesRequest()).workspaces]


def create(daemon: Daemon, root: Path | bytes, *, force: bool = False) -> workspace_pb2.Workspace:
    return daemon.workspaces.CreateWorkspace(CREATE(root=os.fsencode(root), force_root=force))


def refused_root(daemon: Daemon, root: Path | bytes, text: str, reason: Reason = Reason.VALIDATION_ERROR) -> None:
    """``root`` is refused by CreateWorkspace and by Mount alike, and nothing has changed."""
    before = all_of(daemon)
    with refused(reason) as found:
        create(daemon, root)
    assert text in found[0].message
    with refused(reason) as found:
        daemon.workspaces.Mount(MOUNT(root=os.fsencode(root)))
    assert text in found[0].message
    assert all_of(daemon) == before
    assert not cogfs_mounts(daemon.base)
    assert not processes(daemon.base)


def test_what_is_no_directory(daemon: Daemon, project: Path) -> None:
    refused_root(daemon, b"", "")
    refused_root(daemon, b"relative/path", "must be an absolute path")
    refused_root(daemon, b"/a\0b", "zero byte")
    refused_root(daemon, b"/" + b"x" * 5000, "longer than")
    refused_root(daemon, project / "missing", "does not exist")
    refused_root(daemon, project / "src" / "a.txt", "is not a directory")
    refused_root(daemon, project / "src" / "a.txt" / "below", "is not a directory")
    (daemon.base / "loop").symlink_to("loop")
    refused_root(daemon, daemon.base / "loop", "loop of symbolic links")
    refused_root(daemon, b"/proc/sys", "holds no files")


def test_too_much_needs_force(daemon: Daemon) -> None:
    refused_root(daemon, b"/", "root of the filesystem")
    refused_root(daemon, b"//", "root of the filesystem")
    refused_root(daemon, os.fsencode(os.environ.get("HOME", "/root")), "home directory")
    homes = [user.pw_dir for user in pwd.getpwall() if user.pw_name != "root" and os.path.isdir(user.pw_dir)]
    assert homes
    refused_root(daemon, os.fsencode(homes[0]), "home directory")
    refused_root(daemon, b"/usr", "holds the home directory")
    link = daemon.base / "home"
    link.symlink_to(os.environ.get("HOME", "/root"))
    refused_root(daemon, link, "home directory")


def test_a_home_of_the_environment_needs_force(idle: Daemon, project: Path) -> None:
    idle.environ["HOME"] = str(project)
    idle.start()
    refused_root(idle, project, "home directory")
    assert create(idle, project, force=True).root == os.fsencode(project)


def test_the_filesystems_root_holds_the_store_even_when_forced(daemon: Daemon) -> None:
    with refused(Reason.VALIDATION_ERROR) as found:
        create(daemon, b"/", force=True)
    assert "keeps its own files" in found[0].message


def test_registered_already(daemon: Daemon, project: Path) -> None:
    workspace = create(daemon, project)
    link = daemon.base / "link"
    link.symlink_to(project)
    for name in (project, link, daemon.base / "x" / ".." / "project"):
        with refused(Reason.ALREADY_EXISTS) as found:
            create(daemon, name)
        assert found[0].metadata["workspace_id"] == workspace.id
    assert len(all_of(daemon)) == 1


def test_workspaces_do_not_overlap(daemon: Daemon, project: Path) -> None:
    create(daemon, project)
    refused_root(daemon, project / "src", "lies in the workspace")
    refused_root(daemon, daemon.base, "holds the workspace")
    beside = daemon.base / "project-2"
    beside.mkdir()
    create(daemon, beside)
    assert all_of(daemon) == [os.fsencode(project), os.fsencode(beside)]


def test_the_daemons_own_files(daemon: Daemon) -> None:
    refused_root(daemon, daemon.state, "keeps its own files")
    refused_root(daemon, daemon.state / "store" / "packs", "keeps its own files")
    refused_root(daemon, daemon.runtime, "keeps its own files")
    refused_root(daemon, daemon.base, "keeps its own files")


def test_options_that_make_no_sense(daemon: Daemon, project: Path) -> None:
    for exclude in ([""], ["  "], ["a\nb"], ["x" * 5000], ["x"] * 1001):
        with refused(Reason.VALIDATION_ERROR) as found:
            daemon.workspaces.CreateWorkspace(
                CREATE(root=os.fsencode(project), options=workspace_pb2.WorkspaceOptions(exclude=exclude))
            )
        assert "glob" in found[0].message
    assert not all_of(daemon)


def test_options_are_kept(daemon: Daemon, project: Path) -> None:
    options = workspace_pb2.WorkspaceOptions(exclude=["*.log", "/build/"], max_file_bytes=-7)
    workspace = daemon.workspaces.CreateWorkspace(CREATE(root=os.fsencode(project), options=options))
    assert list(workspace.options.exclude) == ["*.log", "/build/"]
    assert workspace.options.max_file_bytes == -1
    assert workspace.state == workspace_pb2.Workspace.DETACHED
    assert workspace.id.startswith("ws_")


def test_get_by_id_and_by_any_path(daemon: Daemon, project: Path) -> None:
    workspace = create(daemon, project)
    link = daemon.base / "link"
    link.symlink_to(project / "src")
    for path in (project, project / "src", project / "src" / "missing" / "x", link / "a.txt"):
        assert daemon.get(path).id == workspace.id
    by_id = daemon.workspaces.GetWorkspace(workspace_pb2.GetWorkspaceRequest(workspace_id=workspace.id))
    assert by_id == daemon.get(project)
    for wrong in (daemon.base, daemon.base / "project-2"):
        with refused(Reason.NOT_FOUND):
            daemon.get(wrong)
    with refused(Reason.NOT_FOUND):
        daemon.workspaces.GetWorkspace(workspace_pb2.GetWorkspaceRequest(workspace_id="ws_none"))
    for request in (
        workspace_pb2.GetWorkspaceRequest(),
        workspace_pb2.GetWorkspaceRequest(workspace_id=workspace.id, path=os.fsencode(project)),
    ):
        with refused(Reason.VALIDATION_ERROR):
            daemon.workspaces.GetWorkspace(request)


def test_names_that_are_not_utf8(daemon: Daemon) -> None:
    root = os.fsencode(daemon.base) + b"/caf\xe9 \n\xff"
    os.mkdir(root)
    workspace = create(daemon, root)
    assert workspace.root == root
    with refused(Reason.ALREADY_EXISTS) as found:
        create(daemon, root)
    assert "caf\\xe9 \\n\\xff" in found[0].message


def test_delete(daemon: Daemon, project: Path) -> None:
    workspace = create(daemon, project)
    daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest(workspace_id=workspace.id))
    assert not all_of(daemon)
    assert (project / "src" / "a.txt").read_text() == "one\n"
    for wrong in (workspace.id, "ws_none"):
        with refused(Reason.NOT_FOUND):
            daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest(workspace_id=wrong))
    with refused(Reason.VALIDATION_ERROR):
        daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest())


def test_what_is_not_mounted(daemon: Daemon, project: Path) -> None:
    workspace = create(daemon, project)
    with refused(Reason.VALIDATION_ERROR) as found:
        daemon.unmount(project)
    assert "is not mounted" in found[0].message
    with refused(Reason.VALIDATION_ERROR):
        daemon.workspaces.ListHandles(workspace_pb2.ListHandlesRequest(workspace_id=workspace.id))
    with refused(Reason.NOT_FOUND):
        daemon.unmount(daemon.base / "project-2")


def test_mountpoints_that_cannot_be(daemon: Daemon, project: Path) -> None:
    create(daemon, project)
    full = daemon.base / "full"
    (full / "x").mkdir(parents=True)
    (daemon.base / "file").touch()
    for at, text in (
        (full, "not empty"),
        (daemon.base / "file", "not a directory"),
        (project / "src", "lies in the workspace"),
        (project / "new", "lies in the workspace"),
        (daemon.base, "holds the workspace"),
        (daemon.base / "missing" / "at", "does not exist"),
        (daemon.state / "at", "keeps its own files"),
        (Path("/proc"), "mounted at"),
        (Path("relative"), "absolute"),
    ):
        with refused(Reason.VALIDATION_ERROR) as found:
            daemon.mount(project, at)
        assert text in found[0].message, at
    assert not (project / "new").exists()
    assert daemon.get(project).state == workspace_pb2.Workspace.DETACHED


HIDE = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 444 /dev/urandom c 1 9 && "
FORBID = HIDE + "mknod -m 600 /dev/fuse c 10 229 && "
NOBODY = "exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all "


def test_no_dev_fuse(idle: Daemon, project: Path) -> None:
    idle.start(prefix=("unshare", "-m", "--propagation", "slave", "sh", "-c", HIDE + 'exec "$@"', "sh"))
    with refused(Reason.UNAVAILABLE) as found:
        idle.mount(project)
    assert "there is no /dev/fuse" in found[0].message
    assert not all_of(idle)


@pytest.fixture
def nobodys(idle: Daemon, project: Path) -> Daemon:
    os.chmod(idle.base, 0o777)
    os.chmod(idle.log.parent, 0o777)
    return idle


def as_nobody(script: str = "") -> tuple[str, ...]:
    return ("unshare", "-m", "--propagation", "slave", "sh", "-c", script + NOBODY + '"$@"', "sh")


def test_no_permission_for_dev_fuse(nobodys: Daemon, project: Path) -> None:
    nobodys.start(prefix=as_nobody(FORBID))
    with refused(Reason.UNAVAILABLE) as found:
        nobodys.mount(project)
    assert "may not open /dev/fuse" in found[0].message
    assert not all_of(nobodys)


def test_no_fusermount3(nobodys: Daemon, project: Path) -> None:
    nobodys.environ["PATH"] = "/nowhere"
    prefix = (
        "/usr/bin/unshare",
        "-m",
        "/bin/sh",
        "-c",
        "PATH=/usr/bin:/bin; " + HIDE + "mknod -m 666 /dev/fuse c 10 229; ",
    )
    script = prefix[-1] + "PATH=/nowhere; exec /usr/bin/setpriv --reuid=65534 --regid=65534 --clear-groups " + '"$@"'
    nobodys.start(prefix=(*prefix[:-1], script, "sh"))
    with refused(Reason.UNAVAILABLE) as found:
        nobodys.mount(project)
    assert "fusermount3 is missing" in found[0].message


def test_a_root_that_the_daemon_may_not_read(nobodys: Daemon, project: Path) -> None:
    nobodys.start(prefix=as_nobody())
    os.chmod(project, 0o700)
    refused_root(nobodys, project, "cannot be read", Reason.DENIED)
    os.chmod(project, 0o744)
    refused_root(nobodys, project, "cannot be searched", Reason.DENIED)


def test_a_store_on_a_full_disk(idle: Daemon, project: Path) -> None:
    idle.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "none", str(idle.state)], check=True)
    try:
        idle.start()
        with (
            (idle.state / "filler").open("wb", buffering=0) as filler,
            pytest.raises(OSError, match="No space left"),
        ):
            while True:
                filler.write(b"x" * 4096)
        refused_root(idle, project, "", Reason.NO_SPACE)
        (idle.state / "filler").unlink()
        assert create(idle, project).root == os.fsencode(project)
        idle.terminate()
    finally:
        idle.close()
        subprocess.run(["umount", "-l", str(idle.state)], check=True)
