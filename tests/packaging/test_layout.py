"""The layout: four portions of one namespace, and code that is generated as checked in."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_PORTIONS = ("fsd", "store", "proto", "client")


def test_no_portion_hides_the_others() -> None:
    for portion in _PORTIONS:
        assert (_REPOSITORY / portion / "cogfs").is_dir()
        assert not (_REPOSITORY / portion / "cogfs" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["fsd", "store", "v1", "client", "ctl"])
def test_each_part_is_imported_from_its_place(name: str) -> None:
    module = importlib.import_module(f"cogfs.{name}")
    assert module.__file__ is not None
    assert module.__doc__
    places = {"v1": "proto", "ctl": "client"}
    assert Path(module.__file__) == _REPOSITORY / places.get(name, name) / "cogfs" / name / "__init__.py"


def test_generated_code_is_current() -> None:
    done = subprocess.run(
        [sys.executable, _REPOSITORY / "proto" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_drift_of_generated_code_is_found(tmp_path: Path) -> None:
    """The check compares: a copy in which one file was changed, and one taken away, does not pass."""
    copy = tmp_path / "proto"
    subprocess.run(["cp", "-r", str(_REPOSITORY / "proto"), str(copy)], check=True, timeout=180)
    with open(copy / "cogfs/v1/admin_pb2.pyi", "a") as file:
        file.write("# changed\n")
    (copy / "cogfs/v1/thread_pb2_grpc.py").unlink()
    check = [sys.executable, str(copy / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "admin_pb2.pyi, thread_pb2_grpc.py" in done.stderr
    subprocess.run([sys.executable, str(copy / "generate.py")], capture_output=True, timeout=600, check=True)
    assert subprocess.run(check, timeout=600, check=False).returncode == 0


def test_versions_agree() -> None:
    with open(_REPOSITORY / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    assert importlib.metadata.version("cogfs") == project["version"]


def test_constraints_pin_everything_that_is_asked_for() -> None:
    with open(_REPOSITORY / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    asked = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        asked += extra
    pinned = {}
    for line in (_REPOSITORY / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator, f"{line!r} is no exact version"
            pinned[_normal(name)] = version
    for requirement in asked:
        name = requirement.split(">")[0].split("=")[0]
        assert importlib.metadata.version(name) == pinned[_normal(name)], f"{name} is not the pinned version"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
