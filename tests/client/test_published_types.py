"""The types of our session's answers, against those that the agent SDK's package publishes.

What is compared by default is ``published_types.json``, facts that were taken from the package. With
``COGFS_FETCH_AGENT_SDK=1`` the package is fetched from the registry (some 80 MB) and compared itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from cogfs.client import RewindFileFailure, RewindFilesResult, RewindResult, RewindScope, RewindStatus, agent_session
from tests.client.published_types import GOLDEN, facts, misfits

_PACKAGE = "qoder-agent-sdk"


def test_ours_are_those_that_were_published() -> None:
    assert agent_session.__file__ is not None
    ours = facts(Path(agent_session.__file__).read_text())
    assert ours == json.loads(GOLDEN.read_text())


def test_what_is_read_from_the_source_is_what_is_imported() -> None:
    golden = json.loads(GOLDEN.read_text())
    for kind in (RewindFilesResult, RewindFileFailure, RewindResult):
        assert set(get_type_hints(kind)) == set(golden["results"][kind.__name__])
    assert sorted(get_args(RewindScope)) == golden["words"]["RewindScope"]
    assert sorted(get_args(RewindStatus)) == golden["words"]["RewindStatus"]


def test_a_difference_is_found() -> None:
    assert agent_session.__file__ is not None
    source = Path(agent_session.__file__).read_text()
    golden = json.loads(GOLDEN.read_text())
    for old, new in (
        ("canRewind: bool", "canRewind: NotRequired[bool]"),
        ("insertions: NotRequired[int]", "insertions: int"),
        ("retainedLeafId: NotRequired[str | None]", "retainedLeafId: NotRequired[str]"),
        ('"rejected"]', '"rejected", "lost"]'),
        ('scope: RewindScope = "both"', 'scope: RewindScope = "files"'),
        ("enable_file_checkpointing: bool | None = None", "enable_file_checkpointing: bool = True"),
    ):
        assert old in source
        assert facts(source.replace(old, new)) != golden


def test_a_misfit_is_found() -> None:
    assert misfits({"canRewind": True, "filesChanged": ["/a"], "insertions": 0}, "RewindFilesResult") == []
    assert misfits({}, "RewindFilesResult") == ["canRewind is missing"]
    assert misfits({"canRewind": 1}, "RewindFilesResult") == ["canRewind is 1 and should be bool"]
    assert misfits({"canRewind": True, "filesChanged": [b"a"], "x": 1}, "RewindFilesResult") == [
        "filesChanged is [b'a'] and should be list[str]",
        "x is 1 and should be nothing",
    ]
    result = {"status": "ready", "targetUserMessageId": "m", "scope": "both"}
    assert misfits({**result, "retainedLeafId": None}, "RewindResult") == []
    assert misfits({**result, "status": "lost"}, "RewindResult") == ["status is 'lost' and should be RewindStatus"]


@pytest.mark.timeout(600)
def test_the_package_still_publishes_them(tmp_path: Path) -> None:
    if os.environ.get("COGFS_FETCH_AGENT_SDK") != "1":
        pytest.skip("fetches 80 MB: asked for by COGFS_FETCH_AGENT_SDK=1")
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*fetch, "--dest", str(tmp_path), _PACKAGE], capture_output=True, text=True, timeout=500, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"{_PACKAGE} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(f"qoder_agent_sdk/{name}.py").decode() for name in ("types", "client")]
    assert facts(*sources) == json.loads(GOLDEN.read_text()), wheel.name
