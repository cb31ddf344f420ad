"""``pip install .`` where nothing else is: a client and a command line that need no FUSE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' directory of an environment with cogfs, its own dependencies and nothing of the daemon's."""
    where = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(where / "venv")], check=True, timeout=600)
    python = where / "venv" / "bin" / "python"
    # From a copy: a build leaves nothing in the repository.
    source = where / "source"
    listed = subprocess.run(
        ["git", "-C", str(_REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        timeout=180,
    )
    for name in filter(None, listed.stdout.split(b"\0")):
        origin = os.path.join(os.fsencode(_REPOSITORY), name)
        if os.path.isfile(origin):
            target = os.path.join(os.fsencode(source), name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(origin, "rb") as original, open(target, "wb") as copy:
                copy.write(original.read())
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", str(_REPOSITORY / "constraints.txt"), str(source)], check=True, timeout=600)
    return python.parent


def _python(clean: Path, code: str) -> str:
    done = subprocess.run(
        [clean / "python", "-c", code], cwd="/", capture_output=True, text=True, timeout=180, check=True
    )
    return done.stdout.strip()


def _ctl(clean: Path, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COGFS_STATE_DIR": str(state), "COGFS_RUNTIME_DIR": str(state / "run")}
    environment.pop("COGFS_ENDPOINT", None)
    command = [str(clean / "cogfsctl"), *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.timeout(1800)
def test_nothing_of_the_daemon_is_installed(clean: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('pyfuse3', 'trio', 'lmdb', 'msgspec') if u.find_spec(n)])"
    assert _python(clean, code) == "[]"


@pytest.mark.timeout(1800)
def test_client_is_imported_from_there(clean: Path) -> None:
    where = _python(clean, "import cogfs.client, cogfs.v1; print(cogfs.client.__file__); print(cogfs.v1.__file__)")
    for line in where.splitlines():
        assert line.startswith(str(clean.parent))


@pytest.mark.timeout(1800)
def test_types_are_installed(clean: Path) -> None:
    (site,) = clean.parent.glob("lib/python3*/site-packages")
    for name in ("v1/py.typed", "client/py.typed", "v1/thread_pb2.pyi", "v1/thread_pb2_grpc.pyi"):
        assert (site / "cogfs" / name).is_file(), name


@pytest.mark.timeout(1800)
def test_command_line_works_and_names_what_the_daemon_needs(clean: Path, tmp_path: Path) -> None:
    version = _ctl(clean, tmp_path, "version", "--json")
    assert version.returncode == 0, version.stderr
    assert json.loads(version.stdout)["daemon_version"] is None
    status = _ctl(clean, tmp_path, "status")
    assert status.returncode == 20
    assert "pip install 'cogfs[daemon]'" in status.stderr
    assert "pyfuse3" in status.stderr
    assert "Traceback" not in status.stderr


@pytest.mark.timeout(1800)
def test_daemon_names_what_it_needs(clean: Path) -> None:
    daemon = subprocess.run([clean / "cogfsd"], cwd="/", capture_output=True, text=True, timeout=180, check=False)
    assert daemon.returncode == 20
    (sentence,) = daemon.stderr.splitlines()
    assert "pip install 'cogfs[daemon]'" in sentence
