"""A daemon that the system gives too little: descriptors, memory, disk, somebody who reads its log, its own files."""
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import BUILD, IS_SANITIZED, PAGED, SLOW, TINY

SIM = ("--device", "sim", "--sim-step-us", "2000")
PARAMS = {"max_tokens": 20, "ignore_eos": True, "seed": 1}


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill_worker(daemon):
    os.kill(daemon.worker_pid(), signal.SIGKILL)


def serve_after_kill(daemon):
    """The prompt is in the prefix cache, and must not be found there when the worker that wrote it is gone."""
    prompt = [1, 2, 3] * 30
    want = daemon.text(prompt, **PARAMS)
    kill_worker(daemon)
    daemon.wait_log("restart 1")
    daemon.wait_ready_again()
    assert daemon.text(prompt, **PARAMS) == want
    assert daemon.metrics()["paged_worker_restarts_total"] == 1


def test_no_descriptor_left(daemons):
    """Clients have taken what there was: no spinning, the worker can be replaced, and all is well once they are gone."""
    d = daemons(*SIM)
    want = d.text([1, 2, 3], **PARAMS)
    pid = d.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", d.port)) as kept:
        time.sleep(0.2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(int(f) for f in os.listdir(f"/proc/{pid}/fd")) + 3, limits[1]))
        held = [socket.create_connection(("127.0.0.1", d.port)) for _ in range(100)]
        before = cpu_s(pid)
        time.sleep(2)
        assert cpu_s(pid) - before < 0.3 * SLOW
        kill_worker(d)
        d.wait_log("restart 1")
        end = time.monotonic() + 20 * SLOW
        while True:
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = kept.recv(4096)
            if b" 200 " in answer:
                break
            assert b" 503 " in answer and time.monotonic() < end, answer
            time.sleep(0.1)
        for s in held:
            s.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    d.wait_ready_again()
    assert d.text([1, 2, 3], **PARAMS) == want


def test_no_descriptor_at_all(daemons):
    """The limit is on the number of a descriptor: below all that are open, nothing more can be opened, whatever is closed. accept must not
    spin, who is connected is served, /health tells that no worker can be started, and time alone does not mend it."""
    d = daemons(*SIM)
    want = d.text([1, 2, 3], **PARAMS)
    pid = d.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", d.port)) as kept:
        time.sleep(0.2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, limits[1]))
        held = [socket.create_connection(("127.0.0.1", d.port)) for _ in range(100)]
        before = cpu_s(pid)
        time.sleep(2)
        assert cpu_s(pid) - before < 0.3 * SLOW
        kill_worker(d)
        d.wait_log("restart 2")
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = kept.recv(4096)
        assert b" 503 " in answer and b'"reason"' in answer, answer
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for s in held:
            s.close()
    d.wait_ready_again()
    assert d.text([1, 2, 3], **PARAMS) == want


def start_with(tmp_path, stderr, *flags, limit_bytes=resource.RLIM_INFINITY):
    """A daemon whose stderr is not a file that can be read: the port is found through its Unix socket's path."""
    path = tmp_path / "paged.sock"
    p = subprocess.Popen([PAGED, "serve", "--uds", path, "--runtime-dir", tmp_path / "run", "--model", TINY, *SIM, *flags], stderr=stderr,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)))
    end = time.monotonic() + 20 * SLOW
    while ask(path, b"GET /health")[:12] != b"HTTP/1.1 200":
        assert time.monotonic() < end and p.poll() is None
        time.sleep(0.02)
    return p, path


def ask(path, what, body=b"", timeout=20):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(timeout * SLOW)
        try:
            s.connect(str(path))
        except OSError:
            return b""
        s.sendall(what + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while data := s.recv(65536):
            answer += data
        return answer


def complete(path):
    answer = ask(path, b"POST /v1/completions", b'{"prompt":[1,2,3],"max_tokens":20,"ignore_eos":true,"seed":1}')
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return answer.partition(b'"text":')[2].partition(b'"usage"')[0]


def outlive_a_kill(p, path):
    want = complete(path)
    worker = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()[0]
    os.kill(int(worker), signal.SIGKILL)
    assert complete(path) == want
    p.terminate()
    assert p.wait(20 * SLOW) == 0


def test_full_disk_for_the_log(tmp_path):
    with open("/dev/full", "wb") as full:
        outlive_a_kill(*start_with(tmp_path, full, "--log-level", "debug"))


def test_log_file_at_its_limit(tmp_path):
    """ulimit -f: a write beyond it raises a signal, which ends a process that does not expect it."""
    with open(tmp_path / "log", "wb") as log:
        p, path = start_with(tmp_path, log, "--log-level", "debug", limit_bytes=2000)
        outlive_a_kill(p, path)
    assert (tmp_path / "log").stat().st_size == 2000  # it was reached


def test_reader_of_the_log_goes_away(tmp_path):
    r, w = os.pipe()
    p, path = start_with(tmp_path, w, "--log-level", "debug")
    os.close(w)
    os.close(r)
    outlive_a_kill(p, path)


def test_reader_of_the_log_stands_still(tmp_path):
    """The pipe is full after some steps at level debug."""
    r, w = os.pipe()
    p, path = start_with(tmp_path, w, "--log-level", "debug")
    os.close(w)
    for _ in range(60):
        complete(path)
    outlive_a_kill(p, path)
    assert len(os.read(r, 1 << 20)) > 60000  # it was full
    os.close(r)


@pytest.mark.skipif(IS_SANITIZED, reason="sanitizers reserve terabytes of address space")
@pytest.mark.parametrize("kind,limit", [("as", 50 << 20), ("as", 100 << 20), ("as", 1 << 30), ("nofile", 10), ("nofile", 20), ("nofile", 64)])
def test_small_limits(tmp_path, kind, limit):
    """Told what is missing, or it serves."""
    least = {"as": 1 << 30, "nofile": 64}[kind]
    args = ["prlimit", f"--{kind}={limit}:{limit}", PAGED, "serve", "--port", "0", "--runtime-dir", tmp_path / "run", "--model", TINY, *SIM]
    p = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    if limit < least:
        _, log = p.communicate(timeout=20)
        assert p.returncode == 71 and f"expected a limit of at least {least}" in log, (p.returncode, log)
        return
    for line in p.stderr:
        if "ready model" in line:
            break
    p.terminate()
    p.communicate(timeout=20)
    assert p.returncode == 0


def test_runtime_directory_is_removed(daemons, tmp_path):
    d = daemons(*SIM)
    shutil.rmtree(tmp_path / "run")
    serve_after_kill(d)


def test_worker_program_is_replaced(daemons, tmp_path):
    """As by an upgrade: first another file under the same name, then none for a while."""
    program = tmp_path / "paged-worker"
    shutil.copy(BUILD / "bin" / "paged-worker", program)
    d = daemons(*SIM, "--worker-path", program)
    shutil.copy(program, tmp_path / "new")
    os.replace(tmp_path / "new", program)
    serve_after_kill(d)
    want = d.text([1, 2, 3], **PARAMS)
    os.rename(program, tmp_path / "away")
    kill_worker(d)
    d.wait_log("worker did not start: cannot start")
    status, _, body = d.request("GET", "/health")
    assert status == 503 and "No such file" in body["reason"]
    os.rename(tmp_path / "away", program)
    d.wait_ready_again()
    assert d.text([1, 2, 3], **PARAMS) == want


def test_stopped_engine_blames_nobody(daemons):
    """For longer than every time-out, in the middle of streams: the clocks run on time awake."""
    d = daemons(*SIM, "--worker-stall-timeout-s", "2", "--step-timeout-s", "3", "--header-timeout-s", "2", "--idle-timeout-s", "2")
    params = {**PARAMS, "max_tokens": 500}
    want = d.text([1, 2, 3], **params)
    out = []
    t = threading.Thread(target=lambda: out.append(d.text([1, 2, 3], **params)))
    t.start()
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", d.port)) as half:
        half.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n")
        time.sleep(0.1)
        d.process.send_signal(signal.SIGSTOP)
        half.sendall(b"\r\n")
        time.sleep(6)
        d.process.send_signal(signal.SIGCONT)
        assert half.recv(4096).startswith(b"HTTP/1.1 200")
    t.join(30 * SLOW)
    assert out == [want]
    assert d.metrics()["paged_worker_restarts_total"] == 0, d.log()
