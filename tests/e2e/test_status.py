"""`paged status` against daemons in every state, and against servers that are no paged or no server at all."""
import json
import os
import signal
import subprocess
import threading
import time

import pytest
from conftest import PAGED, SLOW, TINY, free_port
from test_bench_serve import Stub, status_line

HEALTHY, NOT_READY, USAGE, NOT_REACHED = 0, 1, 64, 69


def status(*args, expect=HEALTHY, env=None, timeout=20):
    """The JSON object, or stderr when there is none."""
    words = [str(PAGED), "status", "--json", "--interval", "0.2", *(str(a) for a in args)]
    done = subprocess.run(words, capture_output=True, timeout=timeout * SLOW, text=True, env={**os.environ, **(env or {})})
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
    assert done.returncode == expect, done.stderr + done.stdout
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_idle(sim):
    sim.text("hello", max_tokens=20)
    s = status("--url", sim.url)
    assert s["healthy"] and s["state"] == "ok" and s["model"] == "paged-tiny" and s["version"] and s["metrics_error"] is None
    assert s["requests_running"] == s["requests_waiting"] == s["kv_usage"] == 0 and s["requests_finished"] >= 1
    assert s["output_tok_s"] == 0 and s["output_tokens"] >= 20 and s["ttft_ms"] > 0 and s["itl_ms"] > 0
    assert [(w["rank"], w["pid"], w["device"]) for w in s["workers"]] == [(0, sim.worker_pid(), "sim")]
    assert 0.2 <= s["interval_s"] < 5 * SLOW and s["uptime_s"] > 0 and s["max_model_len"] > 0


def test_busy(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000", "--max-num-seqs", "3")
    load = subprocess.Popen([str(PAGED), "bench", "serve", "--json", "--url", d.url, "--max-concurrency", "5", "--duration", "600",
                             "--prefix-len", "64", "--output-len", "50"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(2 * SLOW)
        s = status("--url", d.url, "--interval", 1)
    finally:
        load.send_signal(signal.SIGINT)
        load.wait()
    assert s["requests_running"] == 3 and s["requests_waiting"] == 2
    assert 30 < s["output_tok_s"] <= 330 and 0 < s["kv_usage"] < 1
    assert 0.3 < s["prefix_hit_rate"] < 0.6 and s["itl_ms"] > 8


def test_from_the_configuration(daemons, tmp_path):
    port = free_port()
    d = daemons("--device", "sim", "--port", port)
    assert d.port == port
    (tmp_path / "conf").write_text(f"[server]\nport = {port}\n")
    assert status("--config", tmp_path / "conf")["healthy"]
    assert status(env={"PAGED_PORT": str(port)})["url"] == f"http://127.0.0.1:{port}"
    assert status("--port", port, "--host", "0.0.0.0")["url"] == f"http://127.0.0.1:{port}"


def test_unix_socket(daemons, tmp_path):
    d = daemons("--device", "sim", "--uds", tmp_path / "s", wait=False)
    d.wait_log("ready model=")
    assert status("--uds", tmp_path / "s")["healthy"]
    assert status("--url", f"unix:{tmp_path}/s")["healthy"]


def test_key(daemons, tmp_path):
    (tmp_path / "keys").write_text("# ours\nsk-one\nsk-two\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "other").write_text("sk-three\n")
    d = daemons("--device", "sim", "--api-key-file", tmp_path / "keys")
    s = status("--url", d.url, "--api-key-file", tmp_path / "keys")
    assert s["healthy"] and s["requests_running"] == 0
    for flags in ((), ("--api-key-file", tmp_path / "other")):
        s = status("--url", d.url, *flags)
        assert s["healthy"] and s["model"] and s["requests_running"] is None and "--api-key-file" in s["metrics_error"]


def test_draining(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000")
    stream = d.stream("hello", max_tokens=300, ignore_eos=True)
    next(stream)
    d.process.send_signal(signal.SIGTERM)
    d.wait_log("draining requests=1")
    told = status("--url", d.url, expect=NOT_REACHED)  # a draining server takes no connections
    assert told["state"] == "unreachable"
    assert len(list(stream)) > 10


def test_killed_worker(daemons):
    d = daemons("--device", "sim")
    d.text("hello", max_tokens=2)
    d.kill_worker()
    d.wait_ready_again()
    s = status("--url", d.url)
    assert s["worker_restarts"] == 1 and s["workers"][0]["pid"] == d.worker_pid()


def test_worker_that_cannot_start_again(daemons, tmp_path):
    worker = tmp_path / "paged-worker"
    os.symlink(PAGED.parent / "paged-worker", worker)
    d = daemons("--device", "sim", "--worker-path", worker)
    pid = d.worker_pid()
    worker.unlink()
    worker.write_text("#!/bin/sh\nexit 3\n")
    worker.chmod(0o755)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10 * SLOW
    s = status("--url", d.url, expect=NOT_READY)
    assert time.monotonic() < end and not s["healthy"] and s["state"] == "recovering" and s["workers"] == []
    d.process.kill()
    d.process.wait()
    d.log_file.close()


def test_stopped_daemon_is_no_hang(daemons):
    d = daemons("--device", "sim")
    d.process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        s = status("--url", d.url, expect=NOT_REACHED)
        assert s["state"] == "unreachable" and "no answer" in s["reason"] and time.monotonic() - start < 10 * SLOW
    finally:
        d.process.send_signal(signal.SIGCONT)


def test_nobody_listens():
    s = status("--url", f"http://127.0.0.1:{free_port()}", expect=NOT_REACHED)
    assert s["state"] == "unreachable" and "cannot connect" in s["reason"]
    assert "cannot resolve" in status("--url", "http://nowhere.invalid:1", expect=NOT_REACHED)


class Pages(Stub):
    """Answers each path with its own bytes."""

    def __init__(self, pages):
        self.pages = pages
        super().__init__(b"")

    def serve(self, conn):
        with conn:
            try:
                path = conn.recv(65536).split()[1].decode()
                conn.sendall(self.pages.get(path, status_line(404)))
            except (OSError, IndexError):
                pass


@pytest.fixture
def pages():
    made = []

    def make(pages):
        made.append(Pages(pages))
        return made[-1]

    yield make
    for s in made:
        s.listener.close()


def test_another_server(pages):
    """The names of vLLM, an empty health page, nothing of ours."""
    metrics = (b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\nvllm:kv_cache_usage_perc 0.25\n'
               b"vllm:generation_tokens_total 100\nvllm:time_to_first_token_seconds_sum 4\nvllm:time_to_first_token_seconds_count 8\n")
    s = pages({"/health": status_line(200), "/version": status_line(200, b'{"version":"9.9"}'),
               "/v1/models": status_line(200, b'{"data":[{"id":"other"}]}'), "/metrics": status_line(200, metrics)})
    r = status("--url", s.url)
    assert r["healthy"] and r["state"] == "ok" and r["version"] == "9.9" and r["model"] == "other"
    assert (r["requests_running"], r["kv_usage"], r["ttft_ms"], r["output_tok_s"]) == (5, 0.25, 500, 0)
    assert r["requests_waiting"] is None and r["itl_ms"] is None and r["workers"] == [] and r["worker_restarts"] is None
    assert r["tiers"] == []


def test_tiers(pages):
    metrics = ["paged_prefix_cache_queries_total 1000"]
    for tier, size, used, hits, stored, loaded in (("host", 4e6, 1e6, 250, 5e6, 7e6), ("disk", 8e6, 2e6, 100, 3e6, 2e6)):
        metrics += [f'paged_kv_offload_size_bytes{{tier="{tier}"}} {size}', f'paged_kv_offload_used_bytes{{tier="{tier}"}} {used}',
                    f'paged_kv_hit_tokens_total{{tier="{tier}"}} {hits}',
                    f'paged_kv_offload_bytes_total{{tier="{tier}",direction="store"}} {stored}',
                    f'paged_kv_offload_bytes_total{{tier="{tier}",direction="load"}} {loaded}',
                    f'paged_kv_offload_failures_total{{tier="{tier}",direction="load"}} 1',
                    f'paged_kv_offload_failures_total{{tier="{tier}",direction="store"}} 2']
    s = pages({"/health": status_line(200), "/metrics": status_line(200, "\n".join(metrics).encode() + b"\n")})
    host, disk = status("--url", s.url)["tiers"]
    assert host == {"tier": "host", "size_bytes": 4e6, "used_bytes": 1e6, "hit_rate": 0.25, "hit_rate_lately": None, "store_bytes_s": 0,
                    "load_bytes_s": 0, "failed_blocks": 3}
    assert disk["tier"] == "disk" and disk["size_bytes"] == 8e6 and disk["hit_rate"] == 0.1
    done = subprocess.run([str(PAGED), "status", "--url", s.url, "--once", "--interval", "0.1"], capture_output=True, text=True, timeout=20 * SLOW)
    assert "host tier  25.0 % used, 4.0 MB, 25.0 % of the prompt tokens found, stores 0.0 MB/s, loads 0.0 MB/s, 3 blocks failed\n" in done.stdout


@pytest.mark.parametrize("health,expect,state", [
    (status_line(200), HEALTHY, "ok"),
    (status_line(503, b'{"status":"loading","progress":0.5}'), NOT_READY, "loading"),
    (status_line(503, b"\xff\xfe{{{"), NOT_READY, "status 503"),
    (status_line(404), NOT_READY, "status 404"),
    (b"", NOT_REACHED, "unreachable"),
    (b"SSH-2.0-x\r\n", NOT_REACHED, "unreachable"),
])
@pytest.mark.parametrize("rest", [status_line(500), status_line(200, b"\x00\x01 garbage }{"), b"", b"HTTP/1.1 200 OK\r\n",
                                  status_line(200, b'{"data":7,"version":[],"status":{}}')])
def test_garbage(pages, health, expect, state, rest):
    s = pages({"/health": health, "/version": rest, "/v1/models": rest, "/metrics": rest})
    r = status("--url", s.url, expect=expect)
    assert r["state"] == state and r["healthy"] == (expect == HEALTHY) and r["requests_running"] is None
    assert expect == NOT_REACHED or r["metrics_error"]


def test_text_has_no_control_bytes(pages):
    s = pages({"/health": status_line(503, b'{"status":"\\u001b[31mred","reason":"a\\nb"}'),
               "/v1/models": status_line(200, b'{"data":[{"id":"\\u001b]0;x\\u0007"}]}')})
    done = subprocess.run([str(PAGED), "status", "--url", s.url, "--interval", "0.1"], capture_output=True, timeout=20 * SLOW)
    assert done.returncode == NOT_READY and b"\x1b" not in done.stdout and b"\x07" not in done.stdout and b"[31mred" in done.stdout


def test_text(sim):
    done = subprocess.run([str(PAGED), "status", "--url", sim.url, "--once", "--interval", "0.1"], capture_output=True, text=True, timeout=20 * SLOW)
    assert done.returncode == 0 and f"at {sim.url}: ok, up " in done.stdout and f"pid {sim.worker_pid()} on sim" in done.stdout
    assert "running" in done.stdout and "% used" in done.stdout


def test_live_view(sim):
    """On a terminal it goes on, looks again, and outlives the server."""
    pid, fd = os.forkpty()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests were started in the background
        os.execv(PAGED, [str(PAGED), "status", "--url", sim.url, "--interval", "0.2"])
    seen = b""
    end = time.monotonic() + 20 * SLOW
    while seen.count(b"\x1b[H") < 3 and time.monotonic() < end:
        seen += os.read(fd, 65536)
    os.write(fd, b"\x03")
    _, how = os.waitpid(pid, 0)
    os.close(fd)
    assert seen.count(b"paged-tiny, version") >= 3 and os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGINT


@pytest.mark.parametrize("args,told", [
    (("--url", "ftp://x"), "expected http://host:port"),
    (("--url", "https://x"), "https is not spoken here"),
    (("--url",), "--url expects a value"),
    (("--interval", "0"), "--interval: expected 0.1 to 3600"),
    (("--interval", "x"), "--interval: expected 0.1 to 3600"),
    (("--port", "0"), "give --url"),
    (("--api-key-file", "/nowhere"), "/nowhere"),
    (("stray",), "unexpected stray"),
    (("-",), "unexpected -"),
    (("",), "unexpected "),
])
def test_mistakes_are_told(args, told):
    assert told in status(*args, expect=USAGE)


def test_help():
    out = subprocess.run([str(PAGED), "status", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--interval" in out and "Exit status" in out
