"""The daemon as systemd runs it, by a script that speaks systemd's side: NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS, CREDENTIALS_DIRECTORY,
JOURNAL_STREAM, and the unit's system call filter."""
import ctypes
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import IS_SANITIZED, PAGED, ROOT, SLOW, SMOLLM2, TINY

SIM = ("--device", "sim", "--sim-step-us", "1000")

# Runs in the process that becomes the daemon: puts the sockets at 3, 4, ... and names this very process, as systemd does.
EXEC = """
import fcntl, os, sys
fds = [int(n) for n in sys.argv[1].split(",") if n]
pid = os.getpid() if sys.argv[2] == "self" else int(sys.argv[2])
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
for i, fd in enumerate(high):
    os.dup2(fd, 3 + i, inheritable=True)
if fds:
    os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = str(len(fds)), str(pid)
if "WATCHDOG_USEC" in os.environ:
    os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execv(sys.argv[3], sys.argv[3:])
"""


class Manager:
    """One daemon and what it tells its service manager."""

    def __init__(self, tmp_path, *flags, model=TINY, sockets=(), listen_pid="self", watchdog_us=None, env=None, journal=False):
        self.messages = []  # (time, {name: value})
        self.path = tmp_path / f"notify-{time.monotonic_ns()}"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(self.path))
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.log_path = tmp_path / f"log-{time.monotonic_ns()}"
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.path), **(env or {})}
        if watchdog_us:
            environment["WATCHDOG_USEC"] = str(watchdog_us)
        self.log_file = open(self.log_path, "wb")
        if journal:
            st = os.fstat(self.log_file.fileno())
            environment["JOURNAL_STREAM"] = f"{st.st_dev}:{st.st_ino}"
        args = [PAGED, "serve", "--port", "0", "--runtime-dir", tmp_path / "run", "--model", model, *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXEC, ",".join(str(s.fileno()) for s in sockets), str(listen_pid), *[str(a) for a in args]],
            env=environment, stderr=self.log_file, pass_fds=[s.fileno() for s in sockets], start_new_session=True)

    def read(self):
        while data := self.notify.recv(65536):
            self.messages.append((time.monotonic(), dict(line.split("=", 1) for line in data.decode().splitlines())))

    def log(self):
        return self.log_path.read_text(errors="replace")

    def all(self, name):
        return [m[name] for _, m in list(self.messages) if name in m]

    def wait(self, condition, timeout=20):
        end = time.monotonic() + timeout * SLOW
        while not (value := condition()):
            assert time.monotonic() < end and self.process.poll() is None, f"{self.messages}\n{self.log()}"
            time.sleep(0.01)
        return value

    def wait_ready(self):
        self.wait(lambda: self.all("READY"))

    def port(self):
        return int(self.wait(lambda: re.search(r"url=http://127\.0\.0\.1:(\d+)", self.log())).group(1))

    def worker_pid(self):
        out = self.wait(lambda: subprocess.run(["pgrep", "-P", str(self.process.pid), "paged-worker"], capture_output=True, text=True).stdout)
        return int(out.split()[0])

    def stop(self, expect=0):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30 * SLOW)
        self.notify.shutdown(socket.SHUT_RDWR)
        self.reader.join()
        self.notify.close()
        self.log_file.close()
        log = self.log()
        assert status == expect and "Sanitizer" not in log and "runtime error" not in log, log


@pytest.fixture
def managers(tmp_path):
    made = []

    def make(*flags, **kwargs):
        made.append(Manager(tmp_path, *flags, **kwargs))
        return made[-1]

    yield make
    for m in made:
        if not m.log_file.closed:
            m.stop()


def ask(address, method="GET", path="/health", body=None, headers=None, timeout=20):
    """(status, answer) over a TCP port or the path of a unix socket."""
    conn = http.client.HTTPConnection("127.0.0.1", address if isinstance(address, int) else 0, timeout=timeout * SLOW)
    if not isinstance(address, int):
        conn.sock = socket.socket(socket.AF_UNIX)
        conn.sock.settimeout(timeout * SLOW)
        conn.sock.connect(str(address))
    try:
        conn.request(method, path, json.dumps(body) if body is not None else None, headers or {})
        response = conn.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        conn.close()


def complete(address, n=4):
    status, answer = ask(address, "POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": n, "ignore_eos": True}, timeout=60)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == n


# --- readiness and status ---


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is missing: scripts/fetch_model")
def test_ready_after_loading(managers, tmp_path):
    """A load that is slowed down: progress is told, more time is asked for, readiness comes only when a completion works."""
    slow = tmp_path / "slow"
    slow.touch()
    halting = tmp_path / "halting-worker"  # the worker, of which only a few milliseconds run at a time
    halting.write_text(f"""#!/bin/sh
        (while [ -e {slow} ] && kill -STOP $$; do sleep 0.3; kill -CONT $$; sleep 0.001; done) </dev/null >/dev/null 2>&1 &
        exec {PAGED}-worker "$@"
        """)
    halting.chmod(0o755)
    m = managers("--worker-path", halting, model=SMOLLM2)
    try:
        m.wait(lambda: [s for s in m.all("STATUS") if "loading" in s], 60)
        assert not m.all("READY")
        m.process.send_signal(signal.SIGHUP)  # must not be taken for the end of a reload
        m.wait(lambda: "reloaded" in m.log())
        m.wait(lambda: len([s for s in m.all("STATUS") if "loading" in s]) >= 2 or m.all("READY"), 60)
        assert not m.all("READY") and not m.all("RELOADING"), m.messages
    finally:
        slow.unlink()
    m.wait_ready()
    complete(m.port())
    names = [name for _, message in m.messages for name in message]
    assert "EXTEND_TIMEOUT_USEC" in names[:names.index("READY")]
    shown = [int(s.split("%")[0].split(":")[1]) for s in m.all("STATUS") if "loading" in s]
    assert shown == sorted(shown) and shown[-1] <= 100
    assert int(m.all("EXTEND_TIMEOUT_USEC")[0]) >= 10_000_000
    assert len(m.all("READY")) == 1
    m.stop()
    assert m.all("STOPPING") == ["1"] and int(m.all("EXTEND_TIMEOUT_USEC")[-1]) > 30_000_000


def test_never_ready_when_it_cannot_serve(managers, tmp_path):
    m = managers(model=tmp_path / "missing.gguf")
    assert m.process.wait(20 * SLOW) == 66
    m.stop(expect=66)
    assert not m.all("READY")


def test_status_while_serving(managers):
    m = managers(*SIM, "--max-model-len", "100000")
    m.wait_ready()
    m.wait(lambda: [s for s in m.all("STATUS") if s.endswith(": idle")])
    port = m.port()
    t = threading.Thread(target=complete, args=(port, 7000))
    t.start()
    line = m.wait(lambda: [s for s in m.all("STATUS") if "running" in s])[0]
    assert re.fullmatch(r"serving paged-tiny on http://127\.0\.0\.1:\d+: 1 running, 0 waiting, \d+ tokens/s", line), line
    os.kill(m.worker_pid(), signal.SIGKILL)
    m.wait(lambda: [s for s in m.all("STATUS") if s.startswith("restarting the worker: ") and "signal 9" in s])
    t.join()
    told = [t for t, x in m.messages if "STATUS" in x and "serving" in x["STATUS"] and "READY" not in x]
    assert all(b - a > 4.5 for a, b in zip(told, told[1:])), told


def test_reload(managers, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    m = managers(*SIM, "--api-key-file", keys)
    m.wait_ready()
    port = m.port()
    assert ask(port, path="/version", headers={"X-Api-Key": "two"})[0] == 401
    for text, status in (("two\n", 200), ("", 200)):
        n = len(m.all("RELOADING"))
        keys.write_text(text)
        m.process.send_signal(signal.SIGHUP)
        m.wait(lambda: len(m.all("READY")) == n + 2)
        assert ask(port, path="/version", headers={"X-Api-Key": "two"})[0] == status
    names = [k for _, x in m.messages for k in x if k in ("READY", "RELOADING", "MONOTONIC_USEC")]
    assert names == ["READY"] + ["RELOADING", "MONOTONIC_USEC", "READY"] * 2
    assert abs(int(m.all("MONOTONIC_USEC")[-1]) * 1e-6 - time.clock_gettime(time.CLOCK_MONOTONIC)) < 60


# --- watchdog ---

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 17, 0x4206, 0x4207, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Halted:
    """One thread of another process stands still, the others go on."""

    def __init__(self, pid, name):
        tasks = pathlib.Path(f"/proc/{pid}/task")
        self.tid = next(int(t.name) for t in tasks.iterdir() if (t / "comm").read_text().strip() == name)

    def call(self, request):
        if libc.ptrace(request, self.tid, None, None) != 0:
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")

    def __enter__(self):
        self.call(PTRACE_SEIZE)
        self.call(PTRACE_INTERRUPT)
        os.waitpid(self.tid, WALL)

    def __exit__(self, *_):
        libc.ptrace(PTRACE_DETACH, self.tid, None, None)


@pytest.mark.skipif(IS_SANITIZED, reason="waits for pings, ten times as long")
def test_watchdog_follows_the_core_loop(managers):
    m = managers(*SIM, "--worker-stall-timeout-s", "600", watchdog_us=1_000_000 * SLOW)
    half = 0.5 * SLOW
    m.wait_ready()
    port = m.port()

    def pings_in(seconds):
        n = len(m.all("WATCHDOG"))
        time.sleep(seconds)
        return len(m.all("WATCHDOG")) - n

    assert 3 <= pings_in(4.2 * half) <= 5
    # A worker that hangs is the core loop's business, not systemd's.
    worker = m.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    assert pings_in(4.2 * half) >= 3
    os.kill(worker, signal.SIGCONT)
    complete(port)
    with Halted(m.process.pid, "core"):
        assert pings_in(half) <= 1
        assert pings_in(6 * half) == 0
        # The other threads live, so this is no ping of theirs that is missing; and health says so.
        deadline = time.monotonic() + 10 * SLOW
        while (answer := ask(port))[0] != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer[1]["status"] == "stalled"
        assert pings_in(half) == 0
    assert pings_in(4.2 * half) >= 3
    assert ask(port)[0] == 200
    complete(port)


def test_no_watchdog_unless_asked(managers):
    m = managers(*SIM)
    other = managers(*SIM, env={"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"})
    m.wait_ready()
    other.wait_ready()
    time.sleep(0.5)
    assert not m.all("WATCHDOG")


# --- socket activation ---


@pytest.fixture
def sockets(tmp_path):
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    path = tmp_path / "paged.sock"
    unix.bind(str(path))
    unix.listen()
    yield tcp, unix, tcp.getsockname()[1], path
    tcp.close()
    unix.close()


def test_socket_activation(managers, sockets):
    tcp, unix, port, path = sockets
    early = socket.create_connection(("127.0.0.1", port))  # the connection that makes systemd start the service
    early.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    early.settimeout(30 * SLOW)
    m = managers(*SIM, sockets=(tcp, unix), env={"PAGED_HOST": "0.0.0.0"})
    assert early.recv(1000).startswith(b"HTTP/1.1 200 ")
    early.close()
    m.wait_ready()
    assert "2 socket(s) of systemd" in m.log() and f"http://127.0.0.1:{port}" in m.log() and " warn " not in m.log()
    complete(port)
    complete(path)
    fds = os.listdir(f"/proc/{m.worker_pid()}/fd")
    inodes = {os.fstat(s.fileno()).st_ino for s in (tcp, unix)}
    for fd in fds:
        try:
            assert os.stat(f"/proc/{m.worker_pid()}/fd/{fd}").st_ino not in inodes, "the worker holds a listening socket"
        except FileNotFoundError:
            pass
    m.stop()
    # Neither shut down nor unlinked: clients wait for the next one.
    assert path.is_socket()
    waiting = [socket.create_connection(("127.0.0.1", port)), socket.socket(socket.AF_UNIX)]
    waiting[1].connect(str(path))
    managers(*SIM, sockets=(tcp, unix))
    for s in waiting:
        s.settimeout(30 * SLOW)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert s.recv(1000).startswith(b"HTTP/1.1 200 ")
        s.close()


def test_socket_activation_faults(managers, sockets, tmp_path):
    tcp = sockets[0]
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    client = socket.create_connection(tcp.getsockname())  # as Accept=yes would pass
    with open(tmp_path / "file", "w") as file:
        for bad in (udp, client, file):
            m = managers(*SIM, sockets=(tcp, bad))
            assert m.process.wait(20 * SLOW) == 64
            m.stop(expect=64)
            assert "LISTEN_FDS: expected a listening stream socket" in m.log() and "descriptor 4" in m.log()
    m = managers(*SIM, sockets=[tcp] * 33)
    assert m.process.wait(20 * SLOW) == 64
    m.stop(expect=64)
    assert "expected 1 to 32 sockets" in m.log()
    m = managers(*SIM, sockets=(tcp,), listen_pid=1)  # meant for another process
    m.wait_ready()
    assert m.port() != sockets[2]
    udp.close()
    client.close()


def test_inherited_address_without_keys_is_warned_of(managers):
    with socket.create_server(("0.0.0.0", 0)) as s:
        m = managers(*SIM, sockets=(s,))
        m.wait(lambda: "without API keys" in m.log())
        m.wait_ready()


# --- credentials, logs ---


def test_credentials(managers, tmp_path):
    (tmp_path / "cred").mkdir()
    (tmp_path / "cred" / "api-keys").write_text("from-systemd\n")
    m = managers(*SIM, env={"CREDENTIALS_DIRECTORY": str(tmp_path / "cred")})
    m.wait_ready()
    port = m.port()
    assert ask(port, path="/version")[0] == 401
    assert ask(port, path="/version", headers={"Authorization": "Bearer from-systemd"})[0] == 200
    m.stop()
    assert "from-systemd" not in m.log()


def test_journal(managers):
    m = managers(*SIM, "--log-level", "debug", journal=True)
    m.wait_ready()
    complete(m.port())
    os.kill(m.worker_pid(), signal.SIGKILL)
    m.wait(lambda: len(m.all("READY")) == 2)
    m.stop()
    lines = m.log().splitlines()
    assert all(re.match(r"<[3467]>(engine|worker0) [a-z]+: ", line) for line in lines), lines
    assert any(line.startswith("<7>worker0 ") or line.startswith("<6>worker0 ") for line in lines)
    assert any(line.startswith("<6>engine access: method=POST ") for line in lines)


# --- the units ---

UNIT = ROOT / "config" / "paged.service"
needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def analyze(*args):
    return subprocess.run(["systemd-analyze", *map(str, args)], capture_output=True, text=True, timeout=60)


@needs_analyze
def test_units_verify(tmp_path):
    """As installed, but for the paths of this build."""
    units = ("paged.service", "paged.socket", "paged-worker@.service")
    for unit in units:
        text = (ROOT / "config" / unit).read_text().replace("/usr/local/bin/paged", str(PAGED))
        (tmp_path / unit).write_text(text)
    out = analyze("verify", *(tmp_path / unit.replace("@", "@0") for unit in units))
    assert out.returncode == 0 and "paged" not in out.stdout + out.stderr, out.stdout + out.stderr


@needs_analyze
@pytest.mark.parametrize("unit", [UNIT, ROOT / "config" / "paged-worker@.service"], ids=lambda unit: unit.name)
def test_unit_is_closed(unit):
    out = analyze("security", "--offline=true", "--threshold=25", unit)
    score = float(re.search(r"exposure level for paged.*service: ([0-9.]+)", out.stdout).group(1))
    assert score <= 2.5 and out.returncode == 0, out.stdout


# Applied by the process that becomes the daemon: everything but the unit's system calls fails with EPERM.
FILTER = """
import ctypes, errno, json, os, sys
lib = ctypes.CDLL("libseccomp.so.2")
lib.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(lib.seccomp_init(0x00050000 | errno.EPERM))
for name in json.loads(sys.argv[1]):
    number = lib.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert lib.seccomp_rule_add(context, 0x7fff0000, number, 0) == 0
assert lib.seccomp_load(context) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""


def system_calls(group, seen=None):
    seen = set() if seen is None else seen
    calls = set()
    if group not in seen:
        seen.add(group)
        for line in analyze("syscall-filter", group).stdout.splitlines()[1:]:
            word = line.strip()
            if word.startswith("@"):
                calls |= system_calls(word, seen)
            elif word and not word.startswith("#"):
                calls.add(word)
    return calls


@needs_analyze
@pytest.mark.skipif(IS_SANITIZED, reason="sanitizers make system calls of their own")
def test_system_call_filter_is_enough(tmp_path):
    """Daemon and worker live with what the unit allows them: load, serve, survive the worker's death, reload, stop."""
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    filters = re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M)
    assert filters == ["@system-service", "~@privileged"]
    allowed = system_calls("@default") | system_calls("@system-service") - system_calls("@privileged")
    assert "mount" not in allowed and "read" in allowed
    log_path = tmp_path / "log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", FILTER, json.dumps(sorted(allowed)), str(PAGED), "serve", "--port", "0", "--model", str(TINY),
             "--runtime-dir", str(tmp_path / "run")], stderr=log)

    def wait_log(pattern):
        end = time.monotonic() + 20
        while not (match := re.search(pattern, log_path.read_text())):
            assert time.monotonic() < end and process.poll() is None, log_path.read_text()
            time.sleep(0.02)
        return match

    try:
        port = int(wait_log(r"ready .*url=http://127\.0\.0\.1:(\d+) (?s:.*)").group(1))
        complete(port)
        worker = subprocess.run(["pgrep", "-P", str(process.pid), "paged-worker"], capture_output=True, text=True).stdout.split()[0]
        os.kill(int(worker), signal.SIGKILL)
        complete(port)
        process.send_signal(signal.SIGHUP)
        wait_log("reloaded")
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(20)
    assert status == 0, log_path.read_text()
    assert "not permitted" not in log_path.read_text()


def test_install(tmp_path):
    """Every file of the units lands where systemd looks, with the prefix in its paths."""
    build = PAGED.parents[1]
    out = subprocess.run(["make", "-s", "-C", ROOT, "install", f"DESTDIR={tmp_path}", "PREFIX=/opt/p", f"BUILD={build}", "-o", "all"],
                         capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    unit = (tmp_path / "opt/p/lib/systemd/system/paged.service").read_text()
    assert "ExecStart=/opt/p/bin/paged " in unit and "/usr/local" not in unit
    assert (tmp_path / "opt/p/lib/systemd/system/paged.socket").exists()
    users = (tmp_path / "opt/p/lib/sysusers.d/paged.conf").read_text()
    user = re.search(r"^User=(.*)$", unit, re.M).group(1)
    assert re.search(rf"^u {user} ", users, re.M)
