"""Two processes and what happens when one of them goes away."""
import concurrent.futures
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest
from conftest import IS_SANITIZED, SLOW, TINY


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it goes between open and read
        return False


def wait_gone(pid, timeout=5):
    end = time.monotonic() + timeout * SLOW
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


def collect(daemon, prompt, out, key, on_event=None, **params):
    text = ""
    for i, event in enumerate(daemon.stream(prompt, **params)):
        assert "error" not in event, event
        text += "".join(c["text"] for c in event["choices"])
        if on_event:
            on_event(i)
    out[key] = text


def test_killed_worker_costs_a_pause_not_the_request(daemons):
    d = daemons("--max-model-len", "512")
    params = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    seeded = {**params, "temperature": 0.9, "seed": 11}
    want = d.text("And it came to pass", **params)
    want_seeded = d.text("The ship", **seeded)
    out = {}
    first = d.worker_pid()

    def kill(i):
        if i == 20:
            os.kill(d.worker_pid(), signal.SIGKILL)

    threads = [threading.Thread(target=collect, args=(d, "And it came to pass", out, "greedy", kill), kwargs=params),
               threading.Thread(target=collect, args=(d, "The ship", out, "seeded"), kwargs=seeded)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60 * SLOW)
    assert out == {"greedy": want, "seeded": want_seeded}
    # On a busy machine this client may read so late that every token was there before the kill: then the restart is still to come.
    end = time.monotonic() + 30 * SLOW
    while d.metrics()["paged_worker_restarts_total"] != 1:
        assert time.monotonic() < end, d.log()
        time.sleep(0.02)
    d.wait_ready_again()
    assert d.worker_pid() != first and not alive(first)
    d.idle()


def test_repeated_kills_under_load(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "3000")
    params = {"max_tokens": 200, "ignore_eos": True, "seed": 3}
    prompts = [[i + 1, i + 2, i + 3] for i in range(24)]
    want = {i: d.text(p, **params) for i, p in enumerate(prompts)}
    out = {}
    threads = [threading.Thread(target=collect, args=(d, p, out, i), kwargs=params) for i, p in enumerate(prompts)]
    for t in threads:
        t.start()
    for _ in range(3):
        time.sleep(0.3)
        os.kill(d.worker_pid(), signal.SIGKILL)
        time.sleep(0.7)
    for t in threads:
        t.join(60 * SLOW)
    assert out == want
    d.idle()


def test_hung_worker_is_replaced(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "3000", "--worker-stall-timeout-s", "2")
    want = d.text([5, 6, 7], max_tokens=150, ignore_eos=True, seed=1)
    out = {}
    pid = d.worker_pid()

    def freeze(i):
        if i == 30:
            os.kill(pid, signal.SIGSTOP)

    collect(d, [5, 6, 7], out, 0, freeze, max_tokens=150, ignore_eos=True, seed=1)
    assert out[0] == want
    wait_gone(pid)


def test_killed_engine_leaves_no_worker(daemons):
    for flags in (("--device", "sim"), ()):
        d = daemons(*flags)
        worker = d.worker_pid()
        os.kill(d.process.pid, signal.SIGKILL)
        d.process.wait()
        wait_gone(worker)
        d.log_file.close()


def test_worker_that_cannot_start_is_status_70(daemons, tmp_path):
    fake = tmp_path / "worker"
    fake.write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 3\n")
    fake.chmod(0o755)
    d = daemons("--worker-path", fake, wait=False)
    assert d.process.wait(60) == 70
    assert "status 3" in d.log() and "out of cheese" in d.log()
    d.log_file.close()


def test_sigterm_drains(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000")
    out = {}
    t = threading.Thread(target=collect, args=(d, [1, 2], out, 0), kwargs={"max_tokens": 60, "ignore_eos": True})
    t.start()
    d.wait_held(1)
    d.process.send_signal(signal.SIGTERM)
    t.join(30 * SLOW)
    assert len(out) == 1
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


def test_sigterm_answers_what_is_still_being_read(daemons):
    """Bodies that are parsed and tokenized when the signal comes are no running requests yet, and get their answer all the same."""
    d = daemons("--device", "sim", "--shutdown-timeout-s", 30 * SLOW)
    text = "time way people " * 150000
    body = json.dumps({"prompt": text}).encode()
    answers = {}

    def post(path, key):
        answers[key] = d.request("POST", path, body)[0]

    threads = [threading.Thread(target=post, args=(path, (path, i))) for i in range(4) for path in ("/tokenize", "/v1/completions")]
    for t in threads:
        t.start()
    end = time.monotonic() + 20 * SLOW
    while len(answers) + d.metrics()["paged_pool_jobs"] < len(threads):
        assert time.monotonic() < end
    d.process.send_signal(signal.SIGTERM)
    for t in threads:
        t.join(60 * SLOW)
    assert len(answers) == 8 and set(answers.values()) <= {200, 400, 503}, answers
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


def large_answer(d):
    """A client with a small window, as far as the first bytes of an answer of several MB."""
    body = json.dumps({"prompt": [1], "max_tokens": 8000, "n": 4, "temperature": 1, "logprobs": 20, "ignore_eos": True}).encode()
    s = socket.socket()
    s.settimeout(60 * SLOW)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect(("127.0.0.1", d.port))
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, start = s.recv(4096).split(b"\r\n\r\n", 1)
    return s, start, int(head.split(b"Content-Length: ")[1].split()[0])


def test_sigterm_sends_answers_to_their_end(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "0")
    s, answer, n_bytes = large_answer(d)
    d.process.send_signal(signal.SIGTERM)
    d.wait_log("state=draining")
    while chunk := s.recv(65536):
        answer += chunk
    assert len(answer) == n_bytes > 5e6 and len(json.loads(answer)["choices"]) == 4
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


def test_sigterm_does_not_wait_for_who_takes_nothing(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "0", "--shutdown-timeout-s", "2")
    s, _, _ = large_answer(d)
    d.stop()
    s.close()


def test_second_signal_ends_at_once(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000", "--max-model-len", "100000")
    stream = d.stream([1, 2], max_tokens=20000, ignore_eos=True)
    next(stream)
    start = time.monotonic()
    d.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    d.process.send_signal(signal.SIGTERM)
    d.process.wait(10 * SLOW)
    assert time.monotonic() - start < 3 * SLOW
    d.log_file.close()


def test_model_file_away_for_a_moment(daemons, tmp_path):
    """A worker that cannot load what was served before is tried again; another model under the same name is refused."""
    model = tmp_path / "m.gguf"
    shutil.copy(TINY, model)
    d = daemons(model=model)
    model.unlink()
    kill(d.worker_pid())
    d.wait_log("restart 2")
    shutil.copy(TINY, model)
    d.wait_ready_again()
    assert d.complete("a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    changed = bytearray(TINY.read_bytes())
    changed[-100] ^= 1
    (tmp_path / "other").write_bytes(changed)
    os.replace(tmp_path / "other", model)
    kill(d.worker_pid())
    assert d.process.wait(30 * SLOW) not in (0, None)
    assert "the model changed while paged was running" in d.log()
    d.log_file.close()


def child_of(daemon, timeout=10):
    """Pid of the worker as soon as there is one, ready or not."""
    end = time.monotonic() + timeout * SLOW
    while time.monotonic() < end:
        out = subprocess.run(["ps", "-o", "pid=,stat=", "--ppid", str(daemon.process.pid)], capture_output=True, text=True).stdout
        pids = [int(line.split()[0]) for line in out.splitlines() if "Z" not in line.split()[1]]
        if pids:
            return pids[0]
    raise AssertionError("no worker:\n" + daemon.log())


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_kills_while_loading(daemons):
    """Between spawn and hello, between hello and load, while loading: whatever the moment, the next one serves."""
    rng = random.Random(1)
    for _ in range(6):
        d = daemons(wait=False)
        pid = child_of(d)
        time.sleep(rng.uniform(0, 0.05))
        kill(pid)
        d.wait_ready()
        assert d.complete("a", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        assert d.metrics()["paged_worker_restarts_total"] <= 1
        d.stop()


def test_two_kills_in_a_row(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")
    want = d.text([5, 6, 7], max_tokens=60, ignore_eos=True, seed=1)
    out = {}
    for pause in (0, 0.02):
        t = threading.Thread(target=collect, args=(d, [5, 6, 7], out, pause), kwargs={"max_tokens": 60, "ignore_eos": True, "seed": 1})
        t.start()
        time.sleep(0.05)
        first = child_of(d)
        kill(first)
        while (second := child_of(d)) == first:
            time.sleep(0.002)
        time.sleep(pause)
        kill(second)
        t.join(30 * SLOW)
        assert out[pause] == want
    d.idle()


def test_worker_frozen_before_its_first_word(daemons):
    d = daemons("--worker-stall-timeout-s", "1", wait=False)
    pid = child_of(d)
    os.kill(pid, signal.SIGSTOP)
    d.wait_ready(45)
    wait_gone(pid)


def test_signal_while_loading(daemons):
    for delay in (0.05, 0.1, 0.2):
        d = daemons(wait=False)
        pid = child_of(d)
        time.sleep(delay)
        start = time.monotonic()
        d.stop()
        assert time.monotonic() - start < 3 * SLOW
        wait_gone(pid)


def test_drain_while_recovering(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")
    out = {}
    t = threading.Thread(target=collect, args=(d, [1, 2], out, 0), kwargs={"max_tokens": 60, "ignore_eos": True})
    t.start()
    time.sleep(0.1)
    kill(child_of(d))
    d.stop()
    t.join(30 * SLOW)
    assert len(out) == 1


def test_engine_killed_while_the_worker_loads(daemons):
    for delay in (0, 0.02):
        d = daemons(wait=False)
        worker = child_of(d)
        time.sleep(delay)
        d.process.kill()
        d.process.wait()
        wait_gone(worker)
        d.log_file.close()


def abandon(daemon, rng, i):
    """Begins a completion and goes away at some moment: politely or with a reset, streaming or not, reading or not."""
    body = json.dumps({"prompt": [i % 300 + 1] * rng.randrange(1, 300), "max_tokens": 500, "ignore_eos": True,
                       "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 3])}).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=20 * SLOW) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if rng.random() < 0.3:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if b'"stream": true' in body:
            for _ in range(rng.randrange(4)):
                s.recv(300)
        else:
            time.sleep(rng.uniform(0, 0.02))


def rss_kb(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def test_abandoned_requests_leave_nothing(daemons):
    """Rounds of 300, the last with worker kills among them: nothing is held afterwards and memory does not grow."""
    d = daemons("--device", "sim", "--sim-step-us", "1000")
    rng = random.Random(2)
    sizes = []
    for turn in range(3):
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            jobs = [pool.submit(abandon, d, rng, i) for i in range(300)]
            if turn == 2:
                for _ in range(3):
                    kill(child_of(d))
                    time.sleep(0.05)
            for job in jobs:
                job.result()
        d.wait_ready_again()
        m = d.idle()
        assert m["paged_http_connections"] == 1
        sizes.append(rss_kb(d.process.pid))
    assert m["paged_worker_restarts_total"] >= 1
    assert IS_SANITIZED or sizes[2] - sizes[0] < 8192, sizes
    assert d.complete([1, 2, 3], max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20


@pytest.mark.skipif(IS_SANITIZED, reason="sanitizers need memory and time of their own")
def test_idle_costs_nothing(daemons):
    d = daemons()
    d.complete("a", max_tokens=3)
    pids = (d.process.pid, d.worker_pid())

    def cpu_ticks(pid):
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    time.sleep(0.5)
    before = [cpu_ticks(p) for p in pids]
    time.sleep(3)
    assert all(cpu_ticks(p) - b <= 3 for p, b in zip(pids, before))  # 1 % of a CPU
    assert rss_kb(pids[0]) < 60000
