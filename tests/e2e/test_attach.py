"""Workers that an operator starts (`paged-worker --listen`) and engines that find them (`paged serve --worker`)."""
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time

import pytest
from conftest import BUILD, SLOW, TINY, free_port
from test_processes import collect, wait_gone

WORKER = BUILD / "bin" / "paged-worker"
SIM = ("--device", "sim", "--sim-step-us", "3000")
PARAMS = {"max_tokens": 150, "ignore_eos": True, "seed": 3}


class Worker:
    def __init__(self, tmp_path, url, *flags, device="sim", cwd=None):
        self.log_path = tmp_path / f"worker-{time.monotonic_ns()}.log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([str(a) for a in (WORKER, "--listen", url, "--device", device, *flags)], cwd=cwd,
                                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_log(self, pattern, timeout=20):
        end = time.monotonic() + timeout * SLOW
        while not re.search(pattern, self.log()):
            assert time.monotonic() < end, f"no {pattern!r} in the worker's log:\n{self.log()}"
            time.sleep(0.02)

    def wait(self, timeout=10):
        """Its exit status."""
        status = self.process.wait(timeout * SLOW)
        assert "Sanitizer" not in self.log() and "runtime error" not in self.log(), self.log()
        return status

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(url, *flags, **kwargs):
        worker = Worker(tmp_path, url, *flags, **kwargs)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.kill()
        assert "Sanitizer" not in worker.log() and "runtime error" not in worker.log(), worker.log()


@pytest.fixture(params=["ipc", "tcp"])
def url(request, tmp_path):
    return f"ipc://{tmp_path}/w.sock" if request.param == "ipc" else f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def waiting(daemons):
    """An engine that is not ready yet; its HTTP side answers all the same."""

    def make(*flags, **kwargs):
        port = free_port()
        d = daemons(*SIM, *flags, "--port", port, wait=False, **kwargs)
        d.port = port
        end = time.monotonic() + 10 * SLOW
        while True:
            try:
                d.request("GET", "/health")
                return d
            except ConnectionRefusedError:
                assert time.monotonic() < end and d.process.poll() is None, d.log()
                time.sleep(0.02)

    return make


def wait_health(d, status, reason, timeout=20):
    end = time.monotonic() + timeout * SLOW
    while True:
        got, _, body = d.request("GET", "/health")
        if got == status and reason in body.get("reason", ""):
            return body
        assert time.monotonic() < end, (got, body, d.log())
        time.sleep(0.02)


def test_engine_first(waiting, workers, url):
    d = waiting("--worker", url)
    wait_health(d, 503, f"waiting for the worker at {url}")
    assert d.request("POST", "/v1/completions", {"prompt": [1, 2]})[0] == 503
    w = workers(url)
    wait_health(d, 200, "")
    want = d.text([1, 2, 3], **PARAMS)
    # Once it has served, requests wait for the next one.
    w.kill()
    wait_health(d, 503, f"waiting for the worker at {url}")
    out = {}
    t = threading.Thread(target=collect, args=(d, [1, 2, 3], out, 0), kwargs=PARAMS)
    t.start()
    time.sleep(0.3)
    assert not out
    w = workers(url)
    t.join(30 * SLOW)
    assert out[0] == want
    d.stop()
    assert w.wait() == 0


def test_log_level(daemons, workers, url, tmp_path):
    """The worker's own holds until the engine's changes; then that holds for the next worker too."""
    conf = tmp_path / "paged.conf"
    conf.write_text("")

    def reload(level):
        conf.write_text(f"[log]\nlog_level = {level}\n")
        d.process.send_signal(signal.SIGHUP)
        d.wait_log(f"reloaded .*log_level={level}")

    w = workers(url, "--log-level", "debug")
    d = daemons(*SIM, "--worker", url, "--config", conf)
    reload("info")
    d.complete([1, 2], max_tokens=3, ignore_eos=True)
    w.wait_log("worker: step=3 ")
    reload("debug")
    w.wait_log("worker: log_level=debug")
    w.kill()
    w = workers(url)
    w.wait_log("worker: log_level=debug")
    d.wait_ready_again()
    d.complete([1, 2], max_tokens=3, ignore_eos=True)
    w.wait_log("worker: step=")


def test_worker_first(daemons, workers, url):
    w = workers(url)
    w.wait_log("waiting for an engine")
    d = daemons(*SIM, "--worker", url)
    assert d.complete([1, 2], **PARAMS)["usage"]["completion_tokens"] == 150
    assert f'pid="{w.process.pid}"' in next(x for x in d.request("GET", "/metrics")[2].splitlines() if x.startswith("paged_worker_info"))
    d.stop()
    assert w.wait() == 0


def test_same_tokens_as_a_worker_of_its_own(daemons, workers, url):
    """The real model; its path is relative to the engine's directory, which is not the worker's."""
    own = daemons("--max-model-len", "256")
    want = own.text("And it came to pass", max_tokens=60, temperature=0)
    workers(url, device="cpu", cwd="/")
    d = daemons("--max-model-len", "256", "--device", "cpu", "--worker", url, model=os.path.relpath(TINY))
    assert d.text("And it came to pass", max_tokens=60, temperature=0) == want


def test_another_model_at_the_same_path(daemons, waiting, workers, tmp_path):
    """As on another host: the worker sees a file that differs from the engine's."""
    url = f"ipc://{tmp_path}/w.sock"
    model = tmp_path / "m.gguf"
    shutil.copy(TINY, model)
    d = waiting("--device", "cpu", "--worker", url, model=model)
    changed = bytearray(TINY.read_bytes())
    changed[-100] ^= 1
    (tmp_path / "other").write_bytes(changed)
    os.replace(tmp_path / "other", model)
    workers(url, device="cpu")
    d.wait_log("has another model at .*m.gguf than this engine")
    shutil.copy(TINY, tmp_path / "again")
    os.replace(tmp_path / "again", model)
    workers(url, device="cpu")
    d.wait_ready()
    assert d.complete("a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_killed_under_load(daemons, workers, url):
    """Three deaths; each time another worker is started, as systemd would."""
    w = workers(url)
    d = daemons(*SIM, "--worker", url)
    prompts = [[i + 1, i + 2, i + 3] for i in range(16)]
    want = {i: d.text(p, **PARAMS) for i, p in enumerate(prompts)}
    out = {}
    threads = [threading.Thread(target=collect, args=(d, p, out, i), kwargs=PARAMS) for i, p in enumerate(prompts)]
    for t in threads:
        t.start()
    for pause in (0, 0.3, 0.6):
        time.sleep(0.15)
        w.kill()
        time.sleep(pause)
        w = workers(url)
        w.wait_log("has attached")
    for t in threads:
        t.join(60 * SLOW)
    assert out == want
    assert d.metrics()["paged_worker_restarts_total"] == 3
    d.idle()


def test_killed_engine_ends_the_worker_with_status_0(daemons, workers, url):
    for moment in (0, 0.1):
        w = workers(url)
        d = daemons(*SIM, "--worker", url)
        if moment:
            t = threading.Thread(target=lambda: pytest.raises(Exception, d.complete, [1], max_tokens=2000, ignore_eos=True))
            t.start()
            time.sleep(moment)
        d.process.kill()
        d.process.wait()
        d.log_file.close()
        assert w.wait() == 0
    w = workers(url)
    d = daemons(*SIM, "--worker", url)
    d.complete([1, 2], **PARAMS)


def test_stopped_worker_is_left_for_another(daemons, workers, tmp_path):
    url = f"ipc://{tmp_path}/w.sock"
    old = workers(url)
    d = daemons(*SIM, "--worker", url, "--worker-stall-timeout-s", "1")
    want = d.text([5, 6, 7], **PARAMS)
    out = {}
    t = threading.Thread(target=collect, args=(d, [5, 6, 7], out, 0, lambda i: os.kill(old.pid, signal.SIGSTOP) if i == 30 else None), kwargs=PARAMS)
    t.start()
    d.wait_log("made no progress")
    new = workers(url)
    new.wait_log("has attached")
    t.join(30 * SLOW)
    assert out[0] == want
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait() == 0
    assert d.text([5, 6, 7], **PARAMS) == want
    assert new.process.poll() is None
    d.stop()
    assert new.wait() == 0


def test_stopped_worker_over_tcp_serves_again_when_it_is_restarted(daemons, workers):
    """The port is taken as long as the stopped process lives; it gives way when it wakes up."""
    url = f"tcp://127.0.0.1:{free_port()}"
    old = workers(url)
    d = daemons(*SIM, "--worker", url, "--worker-stall-timeout-s", "1")
    want = d.text([5, 6, 7], **PARAMS)
    out = {}
    t = threading.Thread(target=collect, args=(d, [5, 6, 7], out, 0, lambda i: os.kill(old.pid, signal.SIGSTOP) if i == 30 else None), kwargs=PARAMS)
    t.start()
    d.wait_log("made no progress")
    blocked = workers(url)
    assert blocked.wait() == 70
    assert "another worker is there" in blocked.log()
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait() == 0
    workers(url).wait_log("has attached")
    t.join(60 * SLOW)
    assert out[0] == want


@pytest.mark.parametrize("give_up", [False, True])
def test_dying_again_and_again(waiting, workers, url, give_up):
    """Absence does not count, deaths do."""
    d = waiting("--worker", url)
    n = 0
    while d.process.poll() is None and n < (12 if give_up else 3):
        w = workers(url)
        end = time.monotonic() + 60 * SLOW
        while "has attached" not in w.log() and d.process.poll() is None:
            assert time.monotonic() < end, d.log()
            time.sleep(0.01)
        w.kill()
        n += 1
    if give_up:
        assert d.process.wait(30 * SLOW) == 70
        assert "restarts without an acknowledged step" in d.log()
        d.log_file.close()
    else:
        workers(url)
        d.wait_ready()


def make_token(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens(daemons, waiting, workers, tmp_path, url):
    right = make_token(tmp_path / "right", "a-token-of-at-least-thirty-two-bytes\n")
    wrong = make_token(tmp_path / "wrong", "b-token-of-at-least-thirty-two-bytes")
    w = workers(url, "--worker-token-file", right)
    for flags in (("--worker-token-file", wrong), ()):
        d = waiting("--worker", url, *flags)
        wait_health(d, 503, "expected the proof of the same worker token")
        w.wait_log("refused an engine at .*expected the proof of the same worker token")
        d.stop()
        assert "-token-of-" not in d.log()
    d = daemons(*SIM, "--worker", url, "--worker-token-file", right)
    assert d.text([1, 2], **PARAMS)
    assert "-token-of-" not in w.log() + d.log()
    d.stop()
    assert w.wait() == 0
    # An engine with a token and a worker without one.
    w = workers(url)
    d = waiting("--worker", url, "--worker-token-file", right)
    w.wait_log("refused an engine at .*having no worker token")
    # The operator mends it; the engine finds the new one by itself.
    w.process.terminate()
    assert w.wait() == 0
    workers(url, "--worker-token-file", right)
    d.wait_ready()


def run_worker(*args):
    return subprocess.run([str(a) for a in (WORKER, *args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20 * SLOW)


@pytest.mark.parametrize("args, status, message", [
    (("--listen", "tcp://0.0.0.0:7000", "--device", "sim"), 64, "expected a worker_token_file for an address beyond loopback"),
    (("--listen", "tls+tcp://127.0.0.1:7000", "--device", "sim"), 64, "tls+tcp is not built"),
    (("--listen", "w.sock", "--device", "sim"), 64, "expected ipc:///PATH or tcp://HOST:PORT, got w.sock"),
    (("--listen", "ipc://w.sock", "--device", "sim"), 64, "an absolute path"),
    (("--listen", "tcp://127.0.0.1:7000"), 64, "expected --listen URL and --device D"),
    (("--listen", "tcp://127.0.0.1:7000", "--device", "tpu"), 64, "expected cpu or sim, got tpu"),
    (("--listen", "tcp://127.0.0.1:7000", "--device"), 64, "--device: expected a value"),
    (("--listen", "tcp://127.0.0.1:7000", "--device", "sim", "--rank", "x"), 64, "expected 0..1023, got x"),
    (("--listen", "tcp://127.0.0.1:7000", "--device", "sim", "--worker-token-file", "/nonexistent"), 64, "cannot open /nonexistent"),
    (("--listen", "tcp://127.0.0.1:7000", "--device", "sim", "--worker-token-file", "{open}"), 64, "expected mode 0600, got 0644"),
    (("--listen", "tcp://127.0.0.1:7000", "--device", "sim", "--worker-token-file", "{short}"), 64, "expected 32 to 1024 bytes, got 5"),
    (("--listen", "ipc:///nonexistent/w.sock", "--device", "sim"), 70, "cannot listen at ipc:///nonexistent/w.sock"),
    (("--listen", "ipc://{open}", "--device", "sim"), 64, "expected a socket or nothing, got another kind of file"),
    (("--listen", "tcp://192.0.2.1:7000", "--device", "sim", "--worker-token-file", "{good}"), 70, "cannot listen at tcp://192.0.2.1:7000"),
    (("--bogus", "1"), 64, "unknown option --bogus"),
])
def test_worker_mistakes(tmp_path, args, status, message):
    files = {"open": make_token(tmp_path / "open", "x" * 40, 0o644), "short": make_token(tmp_path / "short", "short"),
             "good": make_token(tmp_path / "good", "x" * 40)}
    got = run_worker(*(a.format(**files) for a in args))
    assert message in got.stderr, got.stderr
    assert got.returncode == status
    assert files["open"].read_text() == "x" * 40


def test_worker_help():
    got = run_worker("--help")
    assert got.returncode == 0 and "--worker-token-file" in got.stdout and got.stderr == ""


@pytest.mark.parametrize("flags, message", [
    (("--worker", "tcp://10.1.2.3:7000"), "expected a worker_token_file for an address beyond loopback"),
    (("--worker", "ipc:///run/a.sock,ipc:///run/b.sock"), "more than one worker (tensor or data parallel) is not built"),
    (("--worker", "tls+tcp://gpu1:7000"), "tls+tcp is not built"),
    (("--worker", "http://127.0.0.1:7000"), "worker: expected ipc:///PATH or tcp://HOST:PORT"),
    (("--worker", "tcp://127.0.0.1:7000", "--worker-token-file", "{open}"), "expected mode 0600, got 0644"),
    (("--worker", "tcp://127.0.0.1:7000", "--worker-token-file", "/nonexistent"), "cannot open /nonexistent"),
])
def test_engine_mistakes(daemons, tmp_path, flags, message):
    files = {"open": make_token(tmp_path / "open", "x" * 40, 0o644)}
    d = daemons("--device", "sim", *(f.format(**files) for f in flags), wait=False)
    assert d.process.wait(20 * SLOW) in (64, 66, 71)
    assert message in d.log(), d.log()
    d.log_file.close()


def test_second_engine(daemons, waiting, workers, tmp_path, url):
    w = workers(url)
    first = daemons(*SIM, "--worker", url)
    second = waiting("--worker", url)
    wait_health(second, 503, "it serves another engine" if url.startswith("tcp") else f"waiting for the worker at {url}")
    want = first.text([1, 2], **PARAMS)
    time.sleep(1)
    assert second.log().count("serves another engine") <= 1  # told once
    first.stop()
    assert w.wait() == 0
    w = workers(url)
    second.wait_ready()
    assert second.text([1, 2], **PARAMS) == want
    second.stop()
    assert w.wait() == 0


def raw_socket(url):
    end = time.monotonic() + 5 * SLOW
    while True:
        s = socket.socket(socket.AF_UNIX if url.startswith("ipc://") else socket.AF_INET)
        try:
            s.connect(url[6:] if url.startswith("ipc://") else ("127.0.0.1", int(url.rsplit(":", 1)[1])))
            s.settimeout(5 * SLOW)
            return s
        except OSError:  # the listener is being opened anew
            s.close()
            assert time.monotonic() < end
            time.sleep(0.02)


def throw(url, data, linger):
    try:
        with raw_socket(url) as s:
            s.sendall(data)
            if linger:
                s.settimeout(0.05)
                while s.recv(4096):
                    pass
    except OSError:
        pass


SP_HELLO = b"\0SP\0\0\x10\0\0"  # the first bytes of an NNG pair0 connection


def test_garbage_before_and_while_serving(daemons, workers, url):
    """A port scanner, and one that speaks as far as NNG's own greeting."""
    rng = random.Random(5)
    w = workers(url)
    w.wait_log("waiting for an engine")
    time.sleep(0.2)
    for i in range(60):
        data = rng.choice([b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\0\xff", rng.randbytes(rng.randrange(1, 5000)),
                           SP_HELLO[: rng.randrange(9)], b"\0SP\0\xff\xff\0\0"])
        throw(url, data, rng.random() < 0.3)
    lingering = [raw_socket(url) for _ in range(10)]  # say nothing at all
    for data in (b"", b"\0" * 7 + b"\x05hello", b"\x01" + b"\0" * 7 + b"\x05hello", b"\xff" * 64, rng.randbytes(3000)):
        for attempt in range(20):
            try:
                with raw_socket(url) as s:  # accepted as a peer: refused by what follows
                    s.sendall(SP_HELLO)
                    s.recv(8)
                    s.sendall(data)
                break
            except OSError:  # just then it was opened anew
                time.sleep(0.05)
    d = daemons(*SIM, "--worker", url)
    out = {}
    t = threading.Thread(target=collect, args=(d, [1, 2, 3], out, 0), kwargs=PARAMS)
    t.start()
    if url.startswith("tcp"):
        for _ in range(40):
            throw(url, rng.choice([SP_HELLO, rng.randbytes(200), b"GET / HTTP/1.0\r\n\r\n"]), False)
    t.join(30 * SLOW)
    assert out[0] == d.text([1, 2, 3], **PARAMS)
    assert d.metrics()["paged_worker_restarts_total"] == 0
    for s in lingering:
        s.close()
    d.stop()
    assert w.wait() == 0


def test_ipc_socket_is_private_and_leaves_its_path(daemons, workers, tmp_path):
    path = tmp_path / "w.sock"
    w = workers(f"ipc://{path}")
    w.wait_log("waiting for an engine")
    end = time.monotonic() + 5 * SLOW
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    daemons(*SIM, "--worker", f"ipc://{path}")
    assert not path.exists()


def test_ipc_path_in_use_and_stale(daemons, workers, tmp_path):
    path = tmp_path / "w.sock"
    first = workers(f"ipc://{path}")
    first.wait_log("waiting for an engine")
    time.sleep(0.2)
    second = run_worker("--listen", f"ipc://{path}", "--device", "sim")
    assert second.returncode == 70 and "another worker is there" in second.stderr
    assert path.exists()
    first.kill()
    assert path.exists()  # stale
    w = workers(f"ipc://{path}")
    d = daemons(*SIM, "--worker", f"ipc://{path}")
    d.stop()
    assert w.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_worker_ends_on_a_signal(daemons, workers, tmp_path, signum):
    path = tmp_path / "w.sock"
    w = workers(f"ipc://{path}")
    w.wait_log("waiting for an engine")
    time.sleep(0.2)
    w.process.send_signal(signum)
    assert w.wait() == 0
    assert not path.exists()
    w = workers(f"ipc://{path}")
    d = daemons(*SIM, "--worker", f"ipc://{path}")
    w.process.send_signal(signum)
    assert w.wait() == 0
    wait_health(d, 503, "waiting for the worker")
    workers(f"ipc://{path}")
    d.wait_ready_again()


def test_other_device_is_told(waiting, workers, url):
    w = workers(url, device="cpu")
    d = waiting("--worker", url)
    d.wait_log("expected protocol .* and device sim, got .* and cpu")
    w.wait()
    d.stop()


def test_stop_while_waiting(waiting, url):
    d = waiting("--worker", url)
    wait_health(d, 503, "waiting for the worker")
    start = time.monotonic()
    d.stop()
    assert time.monotonic() - start < 3 * SLOW


def test_frozen_while_it_waits(waiting, workers, url):
    """Stopped before any engine came: the engine neither hangs nor takes it for good."""
    w = workers(url)
    w.wait_log("waiting for an engine")
    time.sleep(0.2)
    os.kill(w.pid, signal.SIGSTOP)
    d = waiting("--worker", url)
    time.sleep(1)
    wait_health(d, 503, "waiting for the worker")
    os.kill(w.pid, signal.SIGCONT)
    d.wait_ready(45)
    assert d.text([1], **PARAMS)
    d.stop()
    wait_gone(w.pid)
