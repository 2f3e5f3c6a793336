"""Real daemons on loopback for the end-to-end tests.

A `Daemon` is one `paged serve` process with a free port, its log in a file and its worker found through the log. Every test ends with its
daemon stopped, and fails if the exit status or a sanitizer report says that something went wrong.
"""
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build"))
PAGED = BUILD / "bin" / "paged"
TINY = ROOT / "config" / "models" / "paged-tiny.gguf"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "paged" / "models"
MISTRAL = ROOT / "tests" / "data" / "models" / "mistral-tiny"
SMOLLM2 = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
IS_SANITIZED = "address" in BUILD.name or "thread" in BUILD.name
SLOW = 10 if IS_SANITIZED else 1  # how much longer things may take


def wait_until(condition, timeout=20):
    end = time.monotonic() + timeout * SLOW
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.02)


def kept_region(seed_file):
    """Where the host tier of a seed file persists."""
    name = hmac.new(seed_file.read_bytes(), b"paged host tier", hashlib.sha256).hexdigest()[:32]
    return pathlib.Path(f"/dev/shm/paged-kv-{os.geteuid()}-{name}")


class Daemon:
    def __init__(self, tmp_path, *flags, model=TINY, env=None, wait=True, prefix=()):
        """prefix: a command that becomes the daemon, as `env` does."""
        self.log_path = tmp_path / f"daemon-{time.monotonic_ns()}.log"
        self.log_file = open(self.log_path, "wb")
        self.seed_files = [pathlib.Path(value) for flag, value in zip(flags, flags[1:]) if flag == "--kv-hash-seed-file"]
        runtime = tmp_path / "run"
        args = [*prefix, PAGED, "serve", "--port", "0", "--runtime-dir", runtime, *flags]
        if model is not None:
            args += ["--model", model]
        self.process = subprocess.Popen([str(a) for a in args], stderr=self.log_file, stdout=subprocess.DEVNULL,
                                        env={**os.environ, **(env or {})}, start_new_session=True)
        self.port = None
        if wait:
            self.wait_ready()

    def log(self):
        return self.log_path.read_text(errors="replace")

    def end(self):
        """Stops it, unless the test has, and takes away what it would keep in shared memory."""
        try:
            if not self.log_file.closed:
                self.stop()
        finally:
            for path in self.seed_files:
                if path.exists():
                    kept_region(path).unlink(missing_ok=True)

    def wait_log(self, pattern, timeout=30):
        end = time.monotonic() + timeout * SLOW
        while time.monotonic() < end:
            match = re.search(pattern, self.log())
            if match:
                return match
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log (exit status {self.process.poll()}):\n{self.log()}")

    def wait_ready(self, timeout=30):
        match = self.wait_log(r"ready model=.* url=http://127\.0\.0\.1:(\d+)", timeout)
        self.port = int(match.group(1))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, parsed JSON or text)"""
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout * SLOW)
        try:
            if isinstance(body, (dict, list)):
                body = json.dumps(body).encode()
            conn.request(method, path, body, headers or {})
            response = conn.getresponse()
            data = response.read()
            kind = response.headers.get("Content-Type", "")
            parsed = json.loads(data) if kind.startswith("application/json") and data else data.decode(errors="replace")
            return response.status, response.headers, parsed
        finally:
            conn.close()

    def complete(self, prompt, **params):
        status, _, answer = self.request("POST", "/v1/completions", {"prompt": prompt, **params})
        assert status == 200, answer
        return answer

    def text(self, prompt, **params):
        return self.complete(prompt, **params)["choices"][0]["text"]

    def stream(self, prompt, timeout=60, **params):
        """Yields the parsed events of a streamed completion; closing the generator closes the connection."""
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout * SLOW)
        try:
            conn.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "stream": True, **params}))
            response = conn.getresponse()
            assert response.status == 200, response.read()
            done = False
            for line in response:
                if line == b"data: [DONE]\n":
                    done = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])
            assert done, "the stream ended without [DONE]"
        finally:
            conn.close()

    def metrics(self):
        status, _, text = self.request("GET", "/metrics")
        assert status == 200
        values = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                key = name.split("{")[0] if "finished_reason" not in name and "le=" not in name else name
                values[key] = values.get(key, 0) + float(value)
        return values

    def worker_pid(self, name="paged-worker"):
        out = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        pids = [int(line.split()[0]) for line in out.stdout.splitlines() if name in line]
        assert len(pids) == 1, out.stdout
        return pids[0]

    def kill_worker(self):
        """Returns when the engine has noticed; before that /health may still be good."""
        n = len(re.findall(r"; restart \d+ in ", self.log()))
        os.kill(self.worker_pid(), signal.SIGKILL)
        self.wait_log(f"; restart {n + 1} in ")

    def wait_held(self, n, timeout=20):
        """Until n requests run or wait."""
        wait_until(lambda: sum(self.metrics()[f"paged_num_requests_{x}"] for x in ("running", "waiting")) == n, timeout)

    def idle(self, timeout=10):
        """Waits until nothing runs or waits and no block is held."""
        end = time.monotonic() + timeout * SLOW
        while True:
            m = self.metrics()
            busy = (m["vllm:num_requests_running"], m["vllm:num_requests_waiting"], m["paged_kv_blocks_used"])
            if busy == (0, 0, 0):
                return m
            assert time.monotonic() < end, f"still busy: {busy}"
            time.sleep(0.05)

    def wait_ready_again(self, timeout=30):
        """After the worker was killed: until /health is good and a worker is there."""
        end = time.monotonic() + timeout * SLOW
        while self.request("GET", "/health")[0] != 200:
            assert time.monotonic() < end, self.log()
            time.sleep(0.02)

    def stop(self, expect=0):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(30 * SLOW)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError("the daemon did not stop on SIGTERM:\n" + self.log())
        finally:
            self.log_file.close()
        log = self.log()
        assert "Sanitizer" not in log and "runtime error" not in log, log
        assert status == expect, f"exit status {status}:\n{log}"


@pytest.fixture
def daemons(tmp_path):
    """A factory; everything it made is stopped, with exit status 0 unless the test stopped it itself."""
    with contextlib.ExitStack() as made:

        def make(*flags, **kwargs):
            wait = kwargs.pop("wait", True)
            daemon = Daemon(tmp_path, *flags, wait=False, **kwargs)
            made.callback(daemon.end)
            if wait:
                daemon.wait_ready()
            return daemon

        yield make


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One daemon with the bundled model for a whole file."""
    daemon = Daemon(tmp_path_factory.mktemp("tiny"), "--max-model-len", "512")
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def sim(tmp_path_factory):
    """One daemon with the simulated worker for a whole file."""
    daemon = Daemon(tmp_path_factory.mktemp("sim"), "--device", "sim", "--sim-step-us", "2000", model=TINY)
    yield daemon
    daemon.stop()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
