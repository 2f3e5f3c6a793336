"""`paged bench serve`: its figures against daemons whose behaviour is known, and against servers that misbehave: no hang, honest counts."""
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import PAGED, SLOW, TINY, free_port

USAGE = 64


def bench(*args, timeout=60, env=None, status=0):
    """The JSON object of one run that must end with `status`."""
    words = [str(PAGED), "bench", "serve", "--json", *(str(a) for a in args)]
    done = subprocess.run(words, capture_output=True, timeout=timeout * SLOW, env={**os.environ, **(env or {})}, text=True)
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(done.stdout) if done.stdout else done.stderr


def failures(result):
    return {kind: n for kind, n in result["failures"].items() if n}


# --- against a daemon ---------------------------------------------------------------------------------------------------------------

def test_closed_loop(sim):
    r = bench("--url", sim.url, "--max-concurrency", 4, "--num-prompts", 24, "--input-len", 32, "--output-len", 20, "--sim-step-us", 2000)
    assert (r["requests"], r["succeeded"], r["failed"], r["without_usage"], r["shorter_than_asked"]) == (24, 24, 0, 0, 0)
    assert (r["input_tokens"], r["output_tokens"]) == (24 * 32, 24 * 20)
    assert r["connections"] == 3  # and the one that asked for the model
    assert r["ttft_ms"]["count"] == r["e2e_ms"]["count"] == r["tpot_ms"]["count"] == 24
    assert r["chunks"] <= 24 * 20 and r["itl_ms"]["count"] == r["chunks"] - 24
    assert r["tokens_per_chunk"] == pytest.approx(r["output_tokens"] / r["chunks"], rel=1e-3)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        h = r[name]
        assert h["p50"] <= h["p90"] <= h["p95"] <= h["p99"] <= h["max"] and 0 < h["mean"] <= h["max"]
    # A step takes 2 ms: 24 requests of 20 steps, 4 at once, take at least 0.24 s.
    assert 0.24 <= r["duration_s"] < 5 * SLOW
    assert r["output_tok_s"] == pytest.approx(r["output_tokens"] / r["duration_s"], rel=1e-3)
    assert r["e2e_ms"]["p50"] >= 38 and r["ttft_ms"]["p50"] >= 1.9
    assert r["tpot_ms"]["mean"] == pytest.approx((r["e2e_ms"]["mean"] - r["ttft_ms"]["mean"]) / 19, rel=0.1)
    assert r["added_itl_ms"]["p99"] == pytest.approx(r["itl_ms"]["p99"] - 2, abs=1e-3)


def test_open_loop_keeps_its_rate(sim):
    r = bench("--url", sim.url, "--request-rate", 50, "--num-prompts", 50, "--input-len", 8, "--output-len", 4)
    assert r["succeeded"] == 50 and r["request_rate"] == 50
    assert 0.5 < r["duration_s"] < 2 * SLOW
    assert r["late_ms"]["count"] == 50 and r["late_ms"]["p50"] < 20 * SLOW


def test_open_loop_beyond_what_the_server_can(sim):
    """The client goes on reading answers however late it is, and tells how late it was."""
    r = bench("--url", sim.url, "--request-rate", 1e6, "--num-prompts", 400, "--max-concurrency", 20, "--input-len", 8, "--output-len", 2)
    assert r["succeeded"] == 400 and r["late_ms"]["max"] > 10 and r["ttft_ms"]["p50"] < r["late_ms"]["max"]
    r = bench("--url", sim.url, "--request-rate", 1e6, "--duration", 0.3, "--input-len", 8, "--output-len", 2, status=1)
    assert r["succeeded"] > 0 and set(failures(r)) <= {"http_429", "http_5xx", "closed"} and r["duration_s"] < 10 * SLOW


def test_duration_ends_the_load(sim):
    r = bench("--url", sim.url, "--duration", 0.5, "--max-concurrency", 2, "--input-len", 8, "--output-len", 8)
    assert r["failed"] == 0 and r["succeeded"] > 2 and 0.5 <= r["duration_s"] < 3 * SLOW
    r = bench("--url", sim.url, "--duration", 0.5, "--request-rate", 0.01)
    assert r["requests"] == 1 and r["duration_s"] < 3 * SLOW


def test_same_seed_same_requests_and_shared_prefixes(sim):
    flags = ("--url", sim.url, "--num-prompts", 8, "--max-concurrency", 1, "--input-len", 100, "--output-len", 2)
    first = bench(*flags, "--seed", 77)
    again = bench(*flags, "--seed", 77)
    other = bench(*flags, "--seed", 78)
    assert (first["cached_tokens"], again["cached_tokens"], other["cached_tokens"]) == (0, 8 * 96, 0)
    shared = bench(*flags, "--seed", 79, "--prefix-len", 64, "--num-prefixes", 2)
    assert shared["cached_tokens"] == 6 * 64


def test_lengths_vary(sim):
    r = bench("--url", sim.url, "--num-prompts", 40, "--input-len", 50, "--output-len", 10, "--random-range-ratio", 0.5)
    assert r["succeeded"] == 40 and r["shorter_than_asked"] == 0
    assert 40 * 25 < r["input_tokens"] < 40 * 75 and r["input_tokens"] != 40 * 50
    assert 40 * 5 < r["output_tokens"] < 40 * 15


def test_text_prompts(sim):
    r = bench("--url", sim.url, "--num-prompts", 3, "--text", "--input-len", 20, "--output-len", 3)
    assert r["succeeded"] == 3 and r["input_tokens"] >= 60


def test_unix_socket(daemons, tmp_path):
    d = daemons("--device", "sim", "--uds", tmp_path / "s", wait=False)
    d.wait_log("ready model=")
    assert bench("--url", f"unix:{tmp_path}/s", "--num-prompts", 3, "--output-len", 3)["succeeded"] == 3


def test_queue_full_is_counted(daemons):
    d = daemons("--device", "sim", "--max-queued-requests", "4")
    r = bench("--url", d.url, "--num-prompts", 20, "--output-len", 200, status=1)
    assert r["requests"] == 20 and r["succeeded"] == 4 and failures(r) == {"http_429": 16}
    assert "429" in r["failure_examples"]["http_429"] and r["output_tokens"] == 4 * 200


def test_killed_worker_is_a_pause_not_a_failure(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000")
    killer = threading.Timer(1, lambda: os.kill(d.worker_pid(), signal.SIGKILL))
    killer.start()
    r = bench("--url", d.url, "--max-concurrency", 8, "--num-prompts", 16, "--output-len", 100)
    killer.join()
    assert r["succeeded"] == 16 and r["failed"] == 0 and r["output_tokens"] == 1600
    assert r["itl_ms"]["max"] > 2 * r["itl_ms"]["p50"]


def test_killed_daemon(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000")
    killer = threading.Timer(1 * SLOW, d.process.kill)
    killer.start()
    r = bench("--url", d.url, "--max-concurrency", 8, "--duration", 600, "--output-len", 20000, status=1)
    killer.join()
    d.process.wait()
    d.log_file.close()
    # A connection that the kernel had made but nobody had taken is closed too.
    assert r["gave_up"] and r["failures"]["closed"] >= 8 and r["failures"]["unreached"] > 0 and r["succeeded"] == 0


# --- a daemon of its own ------------------------------------------------------------------------------------------------------------

OWN = ("--device", "sim", "--model", TINY)


def test_own_daemon():
    r = bench(*OWN, "--sim-step-us", 3000, "--num-prompts", 4, "--output-len", 20)
    assert r["succeeded"] == 4 and r["sim_step_us"] == 3000 and r["itl_ms"]["p50"] >= 2.5
    assert r["engine_cpu_us_per_token"] >= 0 and r["worker_cpu_us_per_token"] >= 0


def test_own_daemon_takes_the_whole_load():
    r = bench(*OWN, "--sim-step-us", 0, "--max-concurrency", 1100, "--num-prompts", 1100, "--output-len", 2, "--input-len", 8,
              "--log-level", "error")
    assert r["succeeded"] == 1100 and r["connections"] >= 1000


def test_rows_of_streams():
    r = bench(*OWN, "--streams", "1,3", "--num-prompts", 6, "--output-len", 5, "--input-len", 8, "--sim-step-us", 1000)
    assert [row["streams"] for row in r["rows"]] == [1, 3]
    assert [row["succeeded"] for row in r["rows"]] == [6, 6] and [row["cached_tokens"] for row in r["rows"]] == [0, 0]


def test_sweep_prints_a_table():
    done = subprocess.run([str(PAGED), "bench", "serve", "--sweep", "--streams", "2", "--duration", "0.3", "--model", str(TINY)],
                          capture_output=True, timeout=60 * SLOW, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line for line in lines if re.fullmatch(r"\d+", line[0])]
    assert [(row[0], row[1]) for row in rows] == [("2", "10.00"), ("2", "0.00")]
    assert all(int(row[2]) > 0 and row[3] == "0" for row in rows)


def test_own_daemon_that_cannot_start(tmp_path):
    told = bench("--model", tmp_path / "nothing", status=66)
    assert "the daemon did not start" in told and "cannot open" in told


def test_own_daemon_ends_with_its_parent(tmp_path):
    p = subprocess.Popen([str(PAGED), "bench", "serve", *map(str, OWN), "--duration", "600", "--max-concurrency", "1"],
                         env={**os.environ, "TMPDIR": str(tmp_path)})  # its log stays behind
    end = time.monotonic() + 20 * SLOW
    children = []
    while not children and time.monotonic() < end:
        time.sleep(0.3)
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(p.pid)], capture_output=True, text=True).stdout.split()
    p.kill()
    p.wait()
    assert len(children) == 1
    while os.path.exists(f"/proc/{children[0]}") and time.monotonic() < end:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{children[0]}")


def test_interrupt_reports_what_there_is():
    p = subprocess.Popen([str(PAGED), "bench", "serve", "--json", *map(str, OWN), "--duration", "600", "--max-concurrency", "3", "--output-len",
                          "50", "--sim-step-us", "1000"], stdout=subprocess.PIPE, text=True)
    time.sleep(2 * SLOW)
    p.send_signal(signal.SIGINT)
    out, _ = p.communicate(timeout=30 * SLOW)
    r = json.loads(out)
    assert p.returncode == 1 and r["succeeded"] > 0 and failures(r) == {"cancelled": 3}


# --- servers that misbehave ---------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6}}\n\ndata: [DONE]\n\n'


class Stub:
    """Answers /v1/models properly and every completion with `answer` (bytes, or a function of the socket)."""

    def __init__(self, answer, models=b'{"data":[{"id":"stub"}]}'):
        self.answer, self.models, self.requests = answer, models, []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        with conn:
            try:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += conn.recv(65536) or b"\r\n\r\n"
                head, body = data.split(b"\r\n\r\n", 1)
                length = re.search(rb"Content-Length: (\d+)", head)
                while length and len(body) < int(length[1]):
                    body += conn.recv(65536)
                if head.startswith(b"GET /v1/models"):
                    conn.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(self.models) + self.models)
                elif head.startswith(b"POST /v1/completions"):
                    self.requests.append((head, json.loads(body)))
                    if callable(self.answer):
                        self.answer(conn)
                    else:
                        conn.sendall(self.answer)
            except OSError:
                pass


@pytest.fixture
def stub():
    made = []

    def make(*args, **kwargs):
        made.append(Stub(*args, **kwargs))
        return made[-1]

    yield make
    for s in made:
        s.listener.close()


def status_line(status, body=b""):
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body


@pytest.mark.parametrize("answer,kind,told", [
    (b"", "closed", "closed"),
    (HEAD, "malformed", "without an event"),
    (HEAD + CHUNK * 3, "closed", "without finish_reason"),
    (HEAD + b"<html>hello</html>", "malformed", "without an event"),
    (HEAD + b"data: {nonsense\n\n", "malformed", "{nonsense"),
    (HEAD + b"data: \x00\xff\xfe\n\n", "malformed", ""),
    (HEAD + LAST, "empty", "no token"),
    (HEAD + CHUNK + b'data: {"error":{"message":"the worker died","code":500}}\n\ndata: [DONE]\n\n', "error_event", "the worker died"),
    (HEAD + b"data: " + b"x" * 2_000_000, "malformed", "more than 1 MiB"),
    (os.urandom(5000), "malformed", ""),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + CHUNK, "closed", ""),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", "malformed", ""),
    (status_line(500, b'{"error":{"message":"oh no"}}'), "http_5xx", "status 500: oh no"),
    (status_line(503, b"x" * 5000), "http_5xx", "status 503: xxx"),
    (status_line(429), "http_429", "status 429"),
    (status_line(400, b"plain"), "http_4xx", "status 400: plain"),
    (status_line(302), "http_other", "status 302"),
])
def test_bad_answers_are_failures(stub, answer, kind, told):
    s = stub(answer)
    r = bench("--url", s.url, "--num-prompts", 7, "--max-concurrency", 3, status=1)
    assert r["requests"] == 7 and r["succeeded"] == 0 and failures(r) == {kind: 7} and told in r["failure_examples"][kind]
    assert len(s.requests) == 7 and r["e2e_ms"]["count"] == 0


def test_server_that_never_answers(stub):
    s = stub(lambda conn: time.sleep(30))
    start = time.monotonic()
    r = bench("--url", s.url, "--num-prompts", 4, "--timeout", 0.5, status=1)
    assert failures(r) == {"timeout": 4} and 0.5 <= time.monotonic() - start < 5 * SLOW


def test_stream_that_stands_still(stub):
    s = stub(lambda conn: (conn.sendall(HEAD + CHUNK * 2), time.sleep(30)))
    r = bench("--url", s.url, "--num-prompts", 2, "--timeout", 0.5, status=1)
    assert failures(r) == {"timeout": 2} and r["chunks"] == 4 and r["ttft_ms"]["count"] == 2


def test_good_and_bad_answers_are_told_apart(stub):
    turn = iter(range(1000))
    s = stub(lambda conn: conn.sendall(HEAD + CHUNK * 3 + LAST + USAGE_EVENT if next(turn) % 3 else status_line(500)))
    r = bench("--url", s.url, "--num-prompts", 9, "--max-concurrency", 1, "--output-len", 6, status=1)
    assert r["succeeded"] == 6 and failures(r) == {"http_5xx": 3} and r["output_tokens"] == 36 and r["tokens_per_chunk"] == 2


def test_chunks_of_several_tokens_are_counted_by_usage(stub):
    s = stub(HEAD + CHUNK * 3 + LAST + USAGE_EVENT)
    r = bench("--url", s.url, "--num-prompts", 5, "--output-len", 6)
    assert (r["output_tokens"], r["chunks"], r["tokens_per_chunk"], r["input_tokens"]) == (30, 15, 2, 25)


def test_server_without_usage(stub):
    s = stub(HEAD + CHUNK * 3 + LAST + b"data: [DONE]\n\n")
    r = bench("--url", s.url, "--num-prompts", 5, "--output-len", 6)
    assert r["output_tokens"] == 15 and r["without_usage"] == 5 and r["shorter_than_asked"] == 5


def test_what_is_sent(stub, tmp_path):
    (tmp_path / "key").write_text("sk-test\nother\n")
    s = stub(HEAD + CHUNK * 3 + LAST + USAGE_EVENT, models=b'{"data":[{"id":"a \\"b","meta":{"n_vocab":7}}]}')
    bench("--url", s.url + "/v1/", "--num-prompts", 2, "--input-len", 40, "--output-len", 6, "--api-key-file", tmp_path / "key",
          "--temperature", 0.5)
    bench("--url", s.url, "--num-prompts", 1, "--model", "named", "--no-ignore-eos", "--text", "--input-len", 4, "--output-len", 6)
    head, body = s.requests[0]
    prompt = body.pop("prompt")
    assert body == {"model": 'a "b', "max_tokens": 6, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True},
                    "ignore_eos": True}
    assert len(prompt) == 40 and set(prompt) <= set(range(7)) and len(set(prompt)) > 3
    assert b"Authorization: Bearer sk-test\r\n" in head + b"\r\n"
    assert s.requests[1][1]["prompt"] != prompt
    assert "ignore_eos" not in s.requests[2][1] and s.requests[2][1]["model"] == "named" and len(s.requests[2][1]["prompt"].split()) == 4


@pytest.mark.parametrize("models", [b"{}", b"nonsense", b'{"data":[]}', b'{"data":[{"id":5}]}', b"[1]"])
def test_models_that_cannot_be_read(stub, models):
    s = stub(HEAD + CHUNK * 3 + LAST + USAGE_EVENT, models=models)
    assert "/v1/models" in bench("--url", s.url, status=1) or "JSON" in bench("--url", s.url, status=1)
    assert bench("--url", s.url, "--model", "m", "--num-prompts", 2, "--output-len", 6)["succeeded"] == 2


# --- mistakes -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args,told", [
    (("--url", "ftp://x"), "expected http://host:port"),
    (("--url", "https://x"), "https is not spoken here"),
    (("--url", "http://127.0.0.1:1", "--device", "sim"), "unexpected --device"),
    (("--url", "http://127.0.0.1:1", "--sweep"), "--sweep measures a daemon of its own"),
    (("--url", "http://127.0.0.1:1", "--server-cpus", "0"), "--server-cpus is for a daemon of its own"),
    (("--num-prompts", "-1"), "--num-prompts: expected 0 to"),
    (("--request-rate", "0"), "--request-rate: expected 1e-06 to 1000000000 or inf"),
    (("--request-rate", "nan"), "--request-rate: expected"),
    (("--duration", "inf"), "--duration: expected"),
    (("--streams", "1,,2"), "--streams: expected"),
    (("--streams", "1", "--max-concurrency", "3"), "--streams sets the concurrency"),
    (("--prefix-len", "200"), "--prefix-len: expected at most --input-len"),
    (("--client-cpus", "x"), "expected CPUs as in 0 or 0,2-3"),
    (("--client-cpus", "3-1"), "expected CPUs as in 0 or 0,2-3"),
    (("--api-key-file", "/nowhere"), "/nowhere"),
    (("--input-len",), "--input-len expects a value"),
    (("--nonsense", "1"), "unknown option nonsense"),
    (("stray",), "unexpected stray"),
])
def test_mistakes_are_told(args, told):
    assert told in bench(*args, status=USAGE)


def test_nobody_listens():
    told = bench("--url", f"http://127.0.0.1:{free_port()}", status=1)
    assert "cannot connect" in told
    r = bench("--url", f"http://127.0.0.1:{free_port()}", "--model", "m", "--num-prompts", 1000, "--max-concurrency", 2, status=1)
    assert r["gave_up"] and r["succeeded"] == 0 and set(failures(r)) == {"unreached"} and r["requests"] < 100


def test_help_lists_the_flags():
    for args, words in ((("bench", "--help"), ("--iterations", "--request-rate")), (("bench", "serve", "--help"), ("--sweep", "--url")),
                        (("bench", "latency", "-h"), ("--iterations",))):
        out = subprocess.run([str(PAGED), *args], capture_output=True, text=True, check=True).stdout
        assert all(word in out for word in words), out
