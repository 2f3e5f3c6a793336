"""Clients that come while the daemon ends: a connection that was there before the signal gets an answer to what it asks at once."""
import json
import random
import re
import signal
import socket
import threading
import time

import pytest
from conftest import SLOW, wait_until

SIM = ("--device", "sim")
GRACE = 1.0  # for a request on its way
BODY = json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(d):
    s = socket.create_connection(("127.0.0.1", d.port), timeout=60 * SLOW)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def read_all(s):
    """Until the end of the connection; a reset raises."""
    data = b""
    while chunk := s.recv(65536):
        data += chunk
    s.close()
    return data


def check_refused(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 "), answer
    assert b"\r\nRetry-After: 1\r\n" in head and b"\r\nConnection: close" in head, head
    assert b"shutting down" in body, body


def await_accepted(d, n):
    """Until n connections besides the one that asks are there."""
    wait_until(lambda: d.metrics()["paged_http_connections"] == n + 1)


def test_requests_on_their_way_are_answered(daemons):
    d = daemons(*SIM)
    silent = [connect(d) for _ in range(4)]
    partial = [connect(d) for _ in range(4)]
    cuts = (1, 30, POST.index(b"\r\n\r\n") + 4, len(POST) - 1)
    for s, cut in zip(partial, cuts):
        s.sendall(POST[:cut])
    idle = connect(d)
    idle.sendall(HEALTH)
    assert b'"ok"' in idle.recv(65536)
    await_accepted(d, 9)
    d.process.send_signal(signal.SIGTERM)
    d.wait_log("draining requests=0")
    silent[0].sendall(POST)
    silent[1].sendall(HEALTH)
    silent[2].sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    for s, cut in zip(partial, cuts):
        s.sendall(POST[cut:])
    assert read_all(idle) == b""
    check_refused(read_all(silent[0]))
    assert b"503 " in (health := read_all(silent[1])) and b'"draining"' in health and b"\r\nConnection: close" in health
    assert b"200 OK" in (version := read_all(silent[2])) and b"\r\nConnection: close" in version
    assert read_all(silent[3]) == b""  # it never asked
    for s in partial:
        check_refused(read_all(s))
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


def test_a_part_of_a_request_is_answered(daemons):
    d = daemons(*SIM)
    clients = [connect(d) for _ in range(3)]
    for s, cut in zip(clients, (5, 40, len(POST) - 1)):
        s.sendall(POST[:cut])
    await_accepted(d, 3)
    d.process.send_signal(signal.SIGTERM)
    for s in clients:
        check_refused(read_all(s))
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_clients_that_wait_in_the_kernel_are_answered(daemons, tmp_path, kind):
    """More than are accepted in one turn of the loop, and the signal is there before the first of them is."""
    path = tmp_path / "s"
    d = daemons(*SIM, *(("--uds", path) if kind == "unix" else ()), wait=kind == "tcp")
    if kind == "unix":
        d.wait_log("ready model=")
    d.process.send_signal(signal.SIGSTOP)
    clients = []
    for _ in range(200):
        if kind == "tcp":
            clients.append(connect(d))
        else:
            clients.append(socket.socket(socket.AF_UNIX))
            clients[-1].settimeout(60 * SLOW)
            clients[-1].connect(str(path))
        clients[-1].sendall(POST)
    d.process.send_signal(signal.SIGTERM)
    d.process.send_signal(signal.SIGCONT)
    for s in clients:
        answer = read_all(s)
        if b"200 OK" not in answer:
            check_refused(answer)
    assert d.process.wait(30 * SLOW) == 0  # stop would send another signal
    d.stop()


@pytest.mark.parametrize("seed", range(12))
def test_no_connection_from_before_the_signal_is_cut(daemons, seed):
    """Clients that connect, wait a moment and ask, as a load balancer does, and a signal at any point of that."""
    rng = random.Random(seed)
    d = daemons(*SIM, "--sim-step-us", "1000")
    faults, n_answered = [], []
    has_ended = threading.Event()
    signalled_at = [float("inf")]

    def ask_on(pauses):
        while not has_ended.is_set():
            try:
                s = connect(d)
            except OSError:
                return  # nobody listens any more
            connected_at = time.monotonic()
            try:
                time.sleep(next(pauses))
                asked_at = time.monotonic()
                s.sendall(POST)
                answer = read_until_answered(s)
                if b"200 OK" not in answer:
                    check_refused(answer)
                n_answered.append(1)
            except (OSError, AssertionError) as e:
                # Whom the machine kept waiting for as long as the grace, and who came as the socket closed, proves nothing.
                if connected_at < signalled_at[0] and asked_at - signalled_at[0] < GRACE / 2:
                    faults.append(f"{e!r} connected {connected_at - signalled_at[0]:.4f} asked {asked_at - signalled_at[0]:.4f}")

    def draw(r):
        while True:
            yield r.choice((0, 0.001, 0.01, 0.1)) * r.random()

    threads = [threading.Thread(target=ask_on, args=(draw(random.Random(rng.random())),)) for _ in range(8)]
    for t in threads:
        t.start()
    wait_until(lambda: len(n_answered) >= 20)
    time.sleep(0.05 * rng.random())
    signalled_at[0] = time.monotonic()
    d.process.send_signal(signal.SIGTERM)
    assert d.process.wait(30 * SLOW) == 0
    has_ended.set()
    for t in threads:
        t.join()
    assert faults == []
    d.stop()


def read_until_answered(s):
    """One answer with a length; the connection may stay."""
    with s:
        data = b""
        while not (m := re.search(rb"Content-Length: (\d+)", data)) or len(data) < data.index(b"\r\n\r\n") + 4 + int(m.group(1)):
            chunk = s.recv(65536)
            assert chunk != b"", f"the connection ended after {data!r}"
            data += chunk
    return data


def time_to_end(d, *, signals=1):
    start = time.monotonic()
    for _ in range(signals):
        d.process.send_signal(signal.SIGTERM)
        if signals > 1:
            d.wait_log("draining requests")
    assert d.process.wait(30 * SLOW) in (0, -signal.SIGTERM)
    return time.monotonic() - start


def test_nobody_is_not_waited_for(daemons):
    """Nor is a client that has been answered, or one that has been silent for long; a second signal waits for none."""
    alone, idle, old, second = [], [], [], []
    for _ in range(3):
        d = daemons(*SIM)
        alone.append(time_to_end(d))
        d = daemons(*SIM)
        s = connect(d)
        s.sendall(HEALTH)
        assert b'"ok"' in s.recv(65536)
        idle.append(time_to_end(d))
        d = daemons(*SIM)
        s = connect(d)
        time.sleep(GRACE * 1.1)
        old.append(time_to_end(d))
        d = daemons(*SIM)
        s = connect(d)
        await_accepted(d, 1)
        second.append(time_to_end(d, signals=2))
    for taken in (alone, idle, old, second):
        assert min(taken) < GRACE / 2 * SLOW, (alone, idle, old, second)
