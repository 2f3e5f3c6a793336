"""Who may use the daemon and what it tells of it: keys, CORS, request ids, the access log, the time limit of a request."""
import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from conftest import SLOW, TINY, wait_until

KEY = "sk-first-Secret"
BEARER = {"Authorization": f"Bearer {KEY}"}
SIM = ("--device", "sim", "--sim-step-us", "1000")


def write_keys(path, *lines, mode=0o600):
    path.write_text("".join(line + "\n" for line in lines))
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    from conftest import Daemon
    tmp = tmp_path_factory.mktemp("guarded")
    keys = write_keys(tmp / "keys", "# of the tests", "", KEY, "second")
    daemon = Daemon(tmp, *SIM, "--api-key-file", keys, "--allowed-origins", "https://app.example,http://localhost:3000")
    yield daemon
    log = daemon.log()
    assert KEY not in log and "second" not in log.replace("seconds", ""), "a key is in the log"
    daemon.stop()


def send(port, data, timeout=20):
    with socket.create_connection(("127.0.0.1", port), timeout=timeout * SLOW) as s:
        s.sendall(data)
        out = b""
        while chunk := s.recv(65536):
            out += chunk
        return out


def access_lines(daemon, request_id, timeout=5):
    """The access lines of one id; waits until there is one."""
    end = time.monotonic() + timeout * SLOW
    while True:
        lines = [line for line in daemon.log().splitlines() if " access: " in line and f" id={request_id}" in line]
        if lines or time.monotonic() > end:
            return lines
        time.sleep(0.02)


# --- keys ---


def test_key_is_asked_for(guarded):
    body = {"prompt": [1], "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"X-Api-Key": "second "+"x"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/nowhere"),
                             ("POST", "/health"), ("GET", "/v1/modelsx")):
            status, head, answer = guarded.request(method, path, body if method == "POST" else None, headers)
            assert status == 401, (headers, method, path, answer)
            assert head["WWW-Authenticate"] == "Bearer" and head["X-Request-Id"]
            assert answer["error"]["code"] == "invalid_api_key" and answer["error"]["param"] is None
            assert answer["error"]["type"] == "authentication_error" and KEY not in json.dumps(answer)
    for headers in (BEARER, {"Authorization": f"bEARER {KEY}"}, {"X-Api-Key": "second"}, {"X-Api-Key": "second \t"},
                    {"Authorization": f"Bearer {KEY} "},
                    {"Authorization": "Basic eDp5", "X-Api-Key": KEY}):
        assert guarded.request("POST", "/v1/completions", body, headers)[0] == 200
        assert guarded.request("GET", "/metrics", headers=headers)[0] == 200


def test_open_without_a_key(guarded):
    assert guarded.request("GET", "/health")[0] == 200
    assert guarded.request("HEAD", "/health")[0] == 200
    assert guarded.request("GET", "/v1/models")[0] == 200
    assert guarded.request("OPTIONS", "/v1/completions")[0] == 204
    assert guarded.request("GET", "/v1/models/x")[0] in (200, 404)


def test_refused_before_the_body(guarded):
    """The answer comes while the body is still to be sent, even for one that would be too large, and no 100 Continue invites it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20 * SLOW) as s:
        s.sendall(head)
        assert s.recv(65536).startswith(b"HTTP/1.1 401 ")
    assert b" 401 " in send(guarded.port, b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    # What is pipelined behind a refused request is not answered: the connection closes.
    two = b"GET /metrics HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    answer = send(guarded.port, two)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer
    answer = send(guarded.port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401") and answer.endswith(b"\r\n\r\n")
    # A key of the query string is no key, and the absolute form opens nothing.
    assert b" 401 " in send(guarded.port, b"GET /metrics?api_key=%s HTTP/1.1\r\n\r\n" % KEY.encode())
    assert b" 401 " in send(guarded.port, b"GET http://x/metrics HTTP/1.1\r\n\r\n")
    assert b" 401 " in send(guarded.port, b"GET http://x/health/../metrics HTTP/1.1\r\n\r\n")
    # A key in a trailer comes too late.
    trailer = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Api-Key: second\r\n\r\n"
    assert b" 401 " in send(guarded.port, trailer)


def test_key_file_faults_end_the_start(daemons, tmp_path):
    missing = tmp_path / "missing"
    for path, told in ((missing, str(missing)), (write_keys(tmp_path / "empty", "# none"), "got no key"),
                       (write_keys(tmp_path / "blank", "good", "two HIDDEN words"), "line 2: expected visible ASCII"),
                       (tmp_path, "regular file")):
        d = daemons(*SIM, "--api-key-file", path, wait=False)
        d.process.wait(20 * SLOW)
        d.stop(expect=64)
        assert told in d.log() and "api_key_file" in d.log() and "HIDDEN" not in d.log()


def test_warnings(daemons, tmp_path):
    d = daemons(*SIM, "--host", "0.0.0.0", wait=False)
    d.wait_log("without API keys")
    keys = write_keys(tmp_path / "keys", KEY, mode=0o644)
    d = daemons(*SIM, "--api-key-file", keys, "--host", "0.0.0.0", wait=False)
    d.wait_log("everybody on this machine may read")
    d.wait_log("ready model=")
    assert "without API keys" not in d.log()
    d = daemons(*SIM)
    assert " warn " not in d.log()


# --- SIGHUP ---


def wait_reload(daemon, n, outcome="reloaded"):
    end = time.monotonic() + 10 * SLOW
    while daemon.log().count(outcome) < n:
        assert time.monotonic() < end, daemon.log()
        time.sleep(0.02)


def test_reload(daemons, tmp_path):
    keys = write_keys(tmp_path / "keys", "old", "both")
    conf = tmp_path / "paged.conf"
    conf.write_text(f"[server]\napi_key_file = {keys}\n[log]\nlog_level = info\n")
    d = daemons(*SIM, "--config", conf)

    def status(key):
        return d.request("GET", "/version", headers={"X-Api-Key": key})[0]

    assert [status(k) for k in ("old", "both", "new")] == [200, 200, 401]
    write_keys(keys, "both", "new")
    d.process.send_signal(signal.SIGHUP)
    wait_reload(d, 1)
    assert [status(k) for k in ("old", "both", "new")] == [401, 200, 200]
    for bad in ("", "# nothing\n", "a b\n"):
        keys.write_text(bad)
        n = d.log().count("reload failed")
        d.process.send_signal(signal.SIGHUP)
        wait_reload(d, n + 1, "reload failed")
        assert [status(k) for k in ("old", "both", "new")] == [401, 200, 200]
    keys.unlink()
    d.process.send_signal(signal.SIGHUP)
    d.wait_log(f"reload failed.*{keys}")
    # An error in the file is told with its line, and nothing of it is taken.
    write_keys(keys, "newest")
    conf.write_text(f"[server]\napi_key_file = {keys}\n[log]\nlog_level = loud\n")
    d.process.send_signal(signal.SIGHUP)
    d.wait_log(f"reload failed.*{conf}:4: log_level")
    assert status("newest") == 401
    # Taking the option out does not open the server.
    conf.write_text("[log]\nlog_level = debug\n")
    n = d.log().count("reloaded")
    d.process.send_signal(signal.SIGHUP)
    wait_reload(d, n + 1)
    assert [status(k) for k in ("both", "none")] == [200, 401]
    assert d.request("GET", "/health", headers={"X-Request-Id": "seen-at-debug"})[0] == 200
    assert access_lines(d, "seen-at-debug")
    assert not re.search(r"\b(both|newest)\b", "\n".join(x for x in d.log().splitlines() if "id=" not in x))


def test_reload_of_the_log_level_reaches_the_worker(daemons, tmp_path):
    conf = tmp_path / "paged.conf"

    def reload(level):
        n = d.log().count("reloaded")
        conf.write_text(f"[log]\nlog_level = {level}\n")
        d.process.send_signal(signal.SIGHUP)
        wait_reload(d, n + 1)

    def lines_of_steps():
        n = len(re.findall(r"worker0 worker: step=", d.log()))
        d.complete([1, 2], max_tokens=3, ignore_eos=True)
        return len(re.findall(r"worker0 worker: step=", d.log())) - n

    conf.write_text("")
    d = daemons(*SIM, "--config", conf)
    assert lines_of_steps() == 0
    reload("info")  # no change
    reload("debug")
    d.wait_log("worker0 worker: log_level=debug")
    assert lines_of_steps() > 0
    d.kill_worker()
    d.wait_ready_again()
    assert lines_of_steps() > 0
    reload("info")
    d.wait_log("worker0 worker: log_level=info")
    assert lines_of_steps() == 0
    assert [x for x in re.findall("worker0 worker: log_level=([a-z]*)", d.log())] == ["debug", "debug", "info"]


def test_reload_under_load(daemons, tmp_path):
    keys = write_keys(tmp_path / "keys", "stays")
    d = daemons(*SIM, "--api-key-file", keys)
    stop = time.monotonic() + 1.5
    bad = []

    def ask():
        while time.monotonic() < stop:
            status, _, answer = d.request("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True},
                                          {"X-Api-Key": "stays"})
            if status != 200:
                bad.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    while time.monotonic() < stop:
        d.process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    for t in threads:
        t.join()
    assert not bad


# --- CORS ---


def preflight(daemon, origin, headers="authorization,content-type,x-stainless-os"):
    return daemon.request("OPTIONS", "/v1/completions", headers={
        "Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers})


def cors_of(head):
    return {k for k in head if k.lower().startswith("access-control")}


def test_cors(guarded):
    status, head, _ = preflight(guarded, "https://app.example")
    assert status == 204 and head["Access-Control-Allow-Origin"] == "https://app.example"
    assert "POST" in head["Access-Control-Allow-Methods"] and "x-stainless-os" in head["Access-Control-Allow-Headers"]
    assert head["Vary"] == "Origin"
    for origin in ("https://app.example.evil", "http://app.example", "null", "https://app.example:8443"):
        status, head, _ = preflight(guarded, origin)
        assert not cors_of(head) and head["Vary"] == "Origin"
    # The page can read answers and errors, with and without a key, also those that come before a handler.
    origin = {"Origin": "http://localhost:3000"}
    for headers, want in ((BEARER, 200), ({}, 401)):
        status, head, _ = guarded.request("GET", "/version", headers={**origin, **headers})
        assert status == want and head["Access-Control-Allow-Origin"] == origin["Origin"]
        assert "X-Request-Id" in head["Access-Control-Expose-Headers"]
    events = send(guarded.port, b"POST /v1/completions HTTP/1.1\r\nOrigin: http://localhost:3000\r\nX-Api-Key: second\r\n"
                  b"Connection: close\r\nContent-Length: 43\r\n\r\n" + b'{"prompt":[1],"stream":true,"max_tokens":2}')
    assert b"Access-Control-Allow-Origin: http://localhost:3000\r\n" in events and b"[DONE]" in events


def test_cors_off_and_any(daemons):
    d = daemons(*SIM)
    status, head, _ = preflight(d, "https://app.example")
    assert status == 204 and not cors_of(head) and "Vary" not in head
    d.stop()
    d = daemons(*SIM, "--allowed-origins", "*")
    status, head, _ = preflight(d, "https://anything.example")
    assert status == 204 and head["Access-Control-Allow-Origin"] == "*" and "Vary" not in head
    d = daemons(*SIM, "--allowed-origins", "app.example", wait=False)
    d.process.wait(20 * SLOW)
    d.stop(expect=64)
    assert "allowed_origins: expected" in d.log()


# --- request ids and the access log ---


def test_request_id(guarded):
    def id_of(given, path="/version"):
        head = guarded.request("GET", path, headers={**BEARER, **({"X-Request-Id": given} if given is not None else {})})[1]
        return head["X-Request-Id"]

    assert id_of("abc-123_~!@") == "abc-123_~!@" and id_of("x" * 128) == "x" * 128
    made = [id_of(None) for _ in range(20)]
    assert len(set(made)) == 20 and all(re.fullmatch("[0-9a-f]{16}", m) for m in made)
    for unusable in ("", "x" * 129, "a b", 'a"b', "a\\b", "caf\xe9"):
        assert re.fullmatch("[0-9a-f]{16}", id_of(unusable)), unusable
    assert id_of("on-errors", "/nowhere") == "on-errors"
    answer = send(guarded.port, b"NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and re.search(rb"X-Request-Id: [0-9a-f]{16}\r\n", answer)
    answer = send(guarded.port, b"GET /version HTTP/1.1\r\nX-Request-Id: late\r\nContent-Length: 99999999999\r\nX-Api-Key: second\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and b"X-Request-Id: late\r\n" in answer
    status, head, answer = guarded.request("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1},
                                           {**BEARER, "X-Request-Id": "mine"})
    assert head["X-Request-Id"] == "mine" and answer["id"] == "cmpl-mine"


def test_access_log(guarded):
    guarded.request("POST", "/v1/completions?api_key=QUERYSECRET", {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True},
                    {**BEARER, "X-Request-Id": "whole"})
    (line,) = access_lines(guarded, "whole")
    assert re.search(r"method=POST path=/v1/completions status=200 bytes=\d+ ms=\d+\.\d id=whole prompt_tokens=3 output_tokens=5$", line)
    guarded.request("GET", "/version", headers={"X-Request-Id": "refused"})
    (line,) = access_lines(guarded, "refused")
    assert "path=/version status=401" in line and "tokens" not in line
    guarded.request("GET", "/health", headers={"X-Request-Id": "probe"})
    guarded.request("GET", "/version", headers={**BEARER, "X-Request-Id": "after-probe"})
    assert access_lines(guarded, "after-probe") and not access_lines(guarded, "probe", 0)
    # One line per request, also of one connection.
    two = b"GET /version HTTP/1.1\r\nX-Api-Key: second\r\nX-Request-Id: p1\r\n\r\n"
    send(guarded.port, two + two.replace(b"p1", b"p2").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert len(access_lines(guarded, "p1")) == len(access_lines(guarded, "p2")) == 1
    send(guarded.port, b"NONSENSE\r\n\r\n")
    guarded.wait_log(r"access: method=- path=- status=400 ")
    assert "QUERYSECRET" not in guarded.log()


def test_access_log_of_those_who_leave(guarded):
    body = b'{"prompt":[1],"max_tokens":5000,"ignore_eos":true,"stream":%s}'
    for stream, status in ((b"false", 499), (b"true", 200)):
        data = body % stream
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=20 * SLOW) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Api-Key: second\r\nX-Request-Id: left-%s\r\nContent-Length: %d\r\n\r\n"
                      % (stream, len(data)) + data)
            if stream == b"true":
                s.recv(1000)
            else:
                time.sleep(0.05)
        (line,) = access_lines(guarded, f"left-{stream.decode()}")
        assert f"status={status} " in line and line.endswith("left_early=1")


def test_no_access_log(daemons):
    d = daemons(*SIM, "--no-access-log", "--log-level", "debug")
    d.request("GET", "/version")
    d.request("GET", "/health")
    d.stop()
    assert " access: " not in d.log()


# --- request_timeout ---


def test_request_timeout(daemons):
    d = daemons(*SIM, "--request-timeout", "1", "--max-num-seqs", "1")
    start = time.monotonic()
    answers = {}

    def ask(name, **extra):
        conn = send(d.port, b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
            name.encode(), len(body := json.dumps({"prompt": [1], "max_tokens": 1000000 // 250, "ignore_eos": True, **extra}).encode()), body))
        answers[name] = (time.monotonic() - start, conn)

    threads = [threading.Thread(target=ask, args=(n,), kwargs=k) for n, k in
               (("running", {"stream": True}), ("queued", {"n": 2}), ("queued-stream", {"stream": True, "n": 2}))]
    for t in threads:
        t.start()
        time.sleep(0.05)
    for t in threads:
        t.join()
    for name, (took, answer) in answers.items():
        assert 0.9 < took < 2.5 * SLOW, (name, took)
        assert b"timeout_error" in answer and b"request_timeout" in answer
        assert (b"HTTP/1.1 504 " in answer) == (name == "queued"), answer[:300]
        if name != "queued":
            events = [line[6:] for line in re.findall(rb"data: [^\n]*", answer)]
            assert json.loads(events[-2])["error"]["code"] == 504 and events[-1] == b"[DONE]"
    m = d.idle()
    assert m["vllm:num_requests_running"] == 0
    assert d.complete([1], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_request_timeout_of_texts(daemons):
    """They wait for a pool of one thread; those that are told so are not begun any more, nor is a text whose client has left."""
    d = daemons(*SIM, "--request-timeout", "1", env={"UV_THREADPOOL_SIZE": "1"})
    text = json.dumps({"prompt": "time way people " * 150000}).encode()
    ids = json.dumps({"tokens": [300] * 400000}).encode()
    answers = []

    def ask(path, body):
        start = time.monotonic()
        status, _, answer = d.request("POST", path, body)
        answers.append((path, status, time.monotonic() - start, answer))

    threads = [threading.Thread(target=ask, args=args) for _ in range(12) for args in (("/tokenize", text), ("/detokenize", ids))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    late = [a for a in answers if a[1] == 504]
    assert len(answers) == 24 and {a[1] for a in answers} <= {200, 504}
    assert {a[0] for a in late} == {"/tokenize", "/detokenize"}
    for _, _, took, answer in late:
        assert took > 0.9 and "request_timeout" in answer["error"]["message"] and answer["error"]["type"] == "timeout_error"
    wait_until(lambda: d.metrics()["paged_pool_jobs"] == 0)
    assert d.metrics()["paged_http_timeouts_total"] == len(late)
    # Texts of clients that leave cost next to nothing but the first of them, which runs.
    before = cpu_ticks(d)
    assert d.request("POST", "/tokenize", text)[0] == 200
    for_one = cpu_ticks(d) - before
    for _ in range(30):
        s = socket.create_connection(("127.0.0.1", d.port), timeout=60 * SLOW)
        s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        s.close()
    wait_until(lambda: d.metrics()["paged_pool_jobs"] == 0)
    assert cpu_ticks(d) - before < 15 * for_one, for_one


def cpu_ticks(d):
    with open(f"/proc/{d.process.pid}/stat") as f:
        return sum(int(x) for x in f.read().rsplit(")", 1)[1].split()[11:13])
