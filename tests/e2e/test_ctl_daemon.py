"""The daemon's life, from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.e2e.ctl import TIMEOUT, Ctl, processes_of


def test_start_status_stop(ctl: Ctl) -> None:
    started = ctl.json("daemon", "start")
    assert started["started"] is True
    status = ctl.json("daemon", "status")
    assert status["pid"] == started["pid"]
    assert status["endpoint"] == f"unix://{ctl.base}/run/cogfsd.sock"
    assert status["version"] == ctl.json("version")["version"]
    assert Path(status["store"]).is_relative_to(ctl.base / "state")
    again = ctl.json("daemon", "start")
    assert (again["pid"], again["started"]) == (status["pid"], False)
    assert ctl.json("version")["daemon_version"] == status["version"]
    assert ctl.json("daemon", "stop") == {"stopped": True, "pid": status["pid"]}
    assert ctl.json("daemon", "stop") == {"stopped": False, "pid": 0}
    ctl.fails("UNAVAILABLE", 20, "daemon", "status")


def test_command_starts_the_daemon_that_it_needs(ctl: Ctl) -> None:
    ctl.fails("UNAVAILABLE", 20, "--no-start", "workspaces")
    assert processes_of(ctl.base) == {}
    assert ctl.json("workspaces") == {"workspaces": []}
    assert ctl.json("--no-start", "workspaces") == {"workspaces": []}


def test_starters_at_once_get_one_daemon(ctl: Ctl) -> None:
    racers = [
        subprocess.Popen(ctl.command("daemon", "start", "--json"), env=ctl.environment, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    answers = []
    for racer in racers:
        out, _ = racer.communicate(timeout=TIMEOUT)
        assert racer.returncode == 0
        answers.append(json.loads(out))
    # Whoever came too late is gone by now: it would be the daemon once that one is told to stop.
    assert {answer["pid"] for answer in answers} == set(processes_of(ctl.base))
    assert [answer["started"] for answer in answers].count(True) == 1
    assert answers[0]["pid"] == ctl.json("daemon", "status")["pid"]


def test_run_in_the_foreground(ctl: Ctl) -> None:
    foreground = subprocess.Popen(ctl.command("daemon", "run"), env=ctl.environment, stderr=subprocess.DEVNULL)
    try:
        while ctl.run("daemon", "status").returncode:
            assert foreground.poll() is None
        assert ctl.json("daemon", "status")["pid"] == foreground.pid
        foreground.send_signal(signal.SIGTERM)
        assert foreground.wait(TIMEOUT) == 0
    finally:
        if foreground.poll() is None:
            foreground.kill()
            foreground.wait()


def test_next_command_after_a_kill_works(daemon: Ctl, mounted: Path) -> None:
    pid = daemon.json("daemon", "status")["pid"]
    snapshot = daemon.json("checkpoint", mounted, "--wait")["id"]
    os.kill(pid, signal.SIGKILL)
    assert daemon.json("show", snapshot)["id"] == snapshot
    assert daemon.json("status", mounted)["state"] == "active"
    assert daemon.json("daemon", "status")["pid"] != pid


def test_mounts_stay_when_asked(ctl: Ctl, project: Path) -> None:
    ctl("daemon", "start", "--leave-mounts")
    worker = ctl.json("mount", project)["worker_pid"]
    ctl("daemon", "stop")
    assert os.path.ismount(project)
    (project / "while-away").write_text("x\n")
    status = ctl.json("status", project)
    assert status["worker_pid"] == worker
    assert status["state"] == "active"


def test_state_of_another_kind_is_refused_with_a_sentence(ctl: Ctl) -> None:
    (ctl.base / "state").mkdir(mode=0o700)
    (ctl.base / "run").write_text("not a directory")
    done = ctl.run("daemon", "start")
    assert done.returncode != 0
    assert b"not a directory" in done.stderr.lower()
    assert b"Traceback" not in done.stderr
    (ctl.base / "run").unlink()
