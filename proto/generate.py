"""Generates the Python code of the API from the .proto files, beside them.

``python proto/generate.py`` writes it; ``--check`` writes nothing and fails, naming the files, when what is checked in
is not what would be written. The code belongs to the versions of grpcio-tools and mypy-protobuf in constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = Path("cogfs/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Writes the code of every .proto file below ``out``. Exits when the compiler is missing or finds an error."""
    try:
        import grpc_tools  # noqa: PLC0415 - a sentence when it is missing, not a traceback
    except ImportError:
        sys.exit("generate: grpcio-tools is not installed; run `make install`")
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    protos = sorted(path.relative_to(HERE).as_posix() for path in (HERE / PACKAGE).glob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={HERE}",
        f"--proto_path={well_known}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *protos,
    ]
    # The plugins of mypy-protobuf are found on PATH; those of this interpreter come first.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, cwd=HERE, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"generate: protoc failed\n{done.stderr.strip()}")


def generated(root: Path) -> dict[str, bytes]:
    """The generated files below ``root``, by name."""
    files = {}
    for path in sorted((root / PACKAGE).iterdir()):
        if path.name.endswith(SUFFIXES):
            files[path.name] = path.read_bytes()
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the Python code of the API.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the code is not current")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cogfs-generate-") as scratch:
        generate(Path(scratch))
        wanted = generated(Path(scratch))
    have = generated(HERE)
    drift = sorted(name for name in wanted.keys() | have.keys() if wanted.get(name) != have.get(name))
    if arguments.check:
        if drift:
            print(f"generate: not current: {', '.join(drift)}; run `python proto/generate.py`", file=sys.stderr)
        return 1 if drift else 0
    for name in drift:
        target = HERE / PACKAGE / name
        if name in wanted:
            target.write_bytes(wanted[name])
        else:
            target.unlink()
        print(f"{'wrote' if name in wanted else 'removed'} {PACKAGE / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
