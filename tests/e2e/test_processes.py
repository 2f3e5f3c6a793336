"""Two processes and what happens when one of them goes away."""
import os
import signal
import threading
import time

from conftest import SLOW


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
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
    assert d.worker_pid() != first and not alive(first)
    assert d.metrics()["paged_worker_restarts_total"] == 1
    assert d.request("GET", "/health")[0] == 200
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
    time.sleep(0.2)
    d.process.send_signal(signal.SIGTERM)
    t.join(30 * SLOW)
    assert len(out) == 1
    d.stop()


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
