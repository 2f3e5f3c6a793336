"""The unit files under a real systemd, sandbox included. Skipped where none can be run (not root, no overlay, no cgroups)."""
import json
import re
import subprocess
import sys
import threading
import time

import pytest
from conftest import IS_SANITIZED, PAGED, ROOT
from systemd_machine import Machine

pytestmark = pytest.mark.skipif(IS_SANITIZED, reason="sanitizers do not fit into the sandbox")

COMPLETION = {"prompt": "And God said", "max_tokens": 4}
CONF = "[model]\nmodel = /usr/share/paged/models/paged-tiny.gguf\n"
DROP_IN = "/etc/systemd/system/paged.service.d/test.conf"

# Stops one thread of the process named, by ptrace, for some seconds.
HALT = """
import ctypes, os, sys, time
pid, seconds = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
tasks = f"/proc/{pid}/task"
tid = next(int(t) for t in os.listdir(tasks) if open(f"{tasks}/{t}/comm").read().strip() == "core")
assert libc.ptrace(0x4206, tid, None, None) == 0 and libc.ptrace(0x4207, tid, None, None) == 0  # seize, interrupt
time.sleep(float(seconds))
"""


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("systemd")
    subprocess.run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={tmp / 'installed'}", "PREFIX=/usr", f"BUILD={PAGED.parents[1]}", "-o", "all"],
                   check=True, stdout=subprocess.DEVNULL)
    machine = Machine(tmp, tmp / "installed")
    machine.run("systemd-sysusers")
    yield machine
    machine.stop()


@pytest.fixture
def machine(booted):
    booted.write("/etc/paged/paged.conf", CONF)
    yield booted
    booted.run("systemctl", "stop", "paged.socket", "paged.service")
    booted.run("rm", "-f", DROP_IN)
    booted.run("systemctl", "daemon-reload")
    booted.run("systemctl", "reset-failed", "paged.service", check=False)


def test_starts_when_ready_and_stops(machine):
    machine.run("systemctl", "start", "paged")
    status, answer = machine.ask("POST", "/v1/completions", COMPLETION)  # no waiting: start returned
    assert status == 200, answer
    assert machine.show("paged", "StatusText").startswith("serving paged-tiny on http://127.0.0.1:8000")
    assert machine.run("stat", "-c", "%U %a", "/run/paged").split() == ["paged", "700"]
    lines = machine.journal("-o", "cat").splitlines()
    assert any(line.startswith("engine serve: ready model=") for line in lines), lines  # priority taken off, no time of its own
    assert machine.journal("-p", "warning", "-o", "cat").strip() in ("", "-- No entries --")
    machine.run("systemctl", "stop", "paged")
    assert machine.show("paged", "Result") == "success" and machine.show("paged", "ExecMainStatus") == "0"


def test_reload_of_the_key_file(machine):
    machine.write("/etc/paged/paged.conf", CONF + "[server]\napi_key_file = /etc/paged/api-keys\n")
    machine.write("/etc/paged/api-keys", "first\n", 0o640, "paged")
    machine.run("systemctl", "start", "paged")
    assert machine.ask("GET", "/version", key="first")[0] == 200
    machine.write("/etc/paged/api-keys", "second\n", 0o640, "paged")
    machine.run("systemctl", "reload", "paged")
    end = time.monotonic() + 10
    while machine.ask("GET", "/version", key="second")[0] != 200:
        assert time.monotonic() < end
    assert machine.ask("GET", "/version", key="first")[0] == 401
    assert machine.show("paged", "ActiveState") == "active" and machine.show("paged", "NRestarts") == "0"


def test_load_credential(machine):
    machine.write("/etc/paged/secret", "handed-over\n", 0o600)  # root's alone
    machine.write(DROP_IN, "[Service]\nLoadCredential=api-keys:/etc/paged/secret\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "paged")
    assert machine.ask("GET", "/version", key="handed-over")[0] == 200
    assert machine.ask("GET", "/version", key="other")[0] == 401


def test_mistakes_are_not_tried_again(machine):
    machine.write("/etc/paged/paged.conf", CONF + "[server]\nprot = 1\n")
    assert "failed" in machine.run("systemctl", "start", "paged", check=False)
    time.sleep(2.5)  # RestartSec is 2
    assert machine.show("paged", "ActiveState") == "failed" and machine.show("paged", "NRestarts") == "0"
    assert machine.show("paged", "ExecMainStatus") == "64"


def test_watchdog_restarts_a_hung_core(machine):
    machine.write(DROP_IN, "[Service]\nWatchdogSec=2\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "paged")
    time.sleep(3)
    assert machine.show("paged", "NRestarts") == "0"
    pid = machine.show("paged", "MainPID")
    machine.run(sys.executable, "-c", HALT, pid, 3.5)
    end = time.monotonic() + 20
    while machine.show("paged", "NRestarts") != "1" or machine.show("paged", "ActiveState") != "active":
        assert time.monotonic() < end, machine.journal()
        time.sleep(0.1)
    assert machine.ask("POST", "/v1/completions", COMPLETION)[0] == 200


def test_socket_activation(machine):
    machine.run("systemctl", "start", "paged.socket")
    assert machine.show("paged", "ActiveState") == "inactive"
    assert machine.ask("POST", "/v1/completions", COMPLETION)[0] == 200  # starts it, waits for the model, is answered
    assert machine.show("paged", "ActiveState") == "active"
    answers = []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            try:
                answers.append(machine.ask("POST", "/v1/completions", COMPLETION)[0])
            except AssertionError as e:
                # Taken in by the old daemon in the moment of its end; a client sends again. None is refused.
                if not re.search("BrokenPipe|ConnectionReset|RemoteDisconnected", str(e)):
                    answers.append(str(e))

    asking = threading.Thread(target=ask)
    asking.start()
    end = time.monotonic() + 60
    while len(answers) < 8 and time.monotonic() < end:
        machine.run("systemctl", "restart", "paged")
        time.sleep(0.2)  # more than five starts within ten seconds are one too many for systemd
        machine.run("systemctl", "reset-failed", "paged")
    stop.set()
    asking.join()
    assert len(answers) >= 8 and set(answers) == {200}, answers


def test_worker_in_a_unit_of_its_own(machine):
    """Either order; the worker killed, the engine restarted: both units come together again by themselves."""
    machine.write("/etc/paged/paged.conf", CONF + "[worker]\nworker = ipc:///run/paged-worker/0.sock\n")
    try:
        machine.run("systemctl", "start", "--no-block", "paged")
        end = time.monotonic() + 20
        while machine.show("paged", "StatusText") != "waiting for the worker at ipc:///run/paged-worker/0.sock":
            assert time.monotonic() < end, machine.show("paged", "StatusText")
        machine.run("systemctl", "start", "paged-worker@0")
        machine.run("systemctl", "start", "paged")  # returns when it is ready
        status, want = machine.ask("POST", "/v1/completions", {**COMPLETION, "temperature": 0})
        assert status == 200, want
        assert machine.run("stat", "-c", "%U %a", "/run/paged-worker").split() == ["paged", "700"]
        text = json.loads(want)["choices"][0]["text"]
        for command in (("kill", "-s", "KILL", "paged-worker@0"), ("restart", "paged-worker@0"), ("restart", "paged")):
            machine.run("systemctl", *command)
            end = time.monotonic() + 20
            while machine.ask("GET", "/health")[0] != 200:
                assert time.monotonic() < end, machine.journal()
            status, answer = machine.ask("POST", "/v1/completions", {**COMPLETION, "temperature": 0})
            assert status == 200 and json.loads(answer)["choices"][0]["text"] == text
        assert machine.show("paged-worker@0", "ActiveState") == "active"
        assert machine.show("paged", "NRestarts") == "0"
        machine.run("systemctl", "stop", "paged-worker@0")
        assert machine.show("paged-worker@0", "Result") == "success"
    finally:
        machine.run("systemctl", "stop", "paged-worker@0")


def test_tiers_of_the_kv_cache(machine):
    """In the sandbox: host memory that ends with the engine or persists over restarts and kills, a folder on disk, a worker in a unit of its own."""
    tiers = ("[cache]\nkv_hash_seed_file = /var/lib/paged/seed\nkv_offload_memory = 32M\nkv_offload_persist = {}\n"
             "kv_offload_dir = /var/lib/paged/kv\nkv_offload_disk = 1G\n")
    prompt = {"prompt": list(range(100)), "max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True}

    def cached():
        status, answer = machine.ask("POST", "/v1/completions", prompt)
        assert status == 200, answer
        return json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens_details"]

    def cached_until(tier):
        end = time.monotonic() + 20
        while cached()[tier] != 96:
            assert time.monotonic() < end, machine.journal()
            machine.ask("POST", "/reset_prefix_cache")
            time.sleep(0.02)

    try:
        for persists in ("false", "true"):
            machine.write("/etc/paged/paged.conf", CONF + tiers.format(persists))
            machine.run("systemctl", "restart", "paged")
            cached_until("host")
        machine.run("systemctl", "restart", "paged")
        assert cached() == {"device": 0, "host": 96, "storage": 0}, machine.journal()
        machine.run("systemctl", "kill", "-s", "KILL", "paged")
        time.sleep(2.5)  # RestartSec is 2
        machine.run("systemctl", "start", "paged")  # returns when it is ready
        assert cached() == {"device": 0, "host": 96, "storage": 0}, machine.journal()
        machine.run("systemctl", "stop", "paged")
        machine.write("/etc/paged/paged.conf", CONF + tiers.format("false") + "[worker]\nworker = ipc:///run/paged-worker/0.sock\n")
        machine.run("systemctl", "start", "paged-worker@0", "paged")
        cached_until("host")
        machine.run("systemctl", "stop", "paged")
        left = machine.run("ls", "/dev/shm").split()
        assert len(left) == 1, left  # what persists
    finally:
        machine.run("systemctl", "stop", "paged-worker@0")
        machine.run("sh", "-c", "rm -f /dev/shm/paged-kv-*")
