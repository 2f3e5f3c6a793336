"""A worker that dies, hangs or talks nonsense at every message boundary (chaos_worker.c says how): no request fails, every output is the
undisturbed one, and the metrics name the reason. PAGED_CHAOS_FULL=1 runs every action at every point."""
import os
import random
import re
import threading
import time

import pytest
from conftest import BUILD, IS_SANITIZED, SLOW, wait_until

CHAOS_WORKER = BUILD / "tests" / "e2e" / "chaos_worker"
FULL = os.environ.get("PAGED_CHAOS_FULL") == "1"
PARAMS = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8}
N_STREAMS = 6

pytestmark = pytest.mark.skipif(not CHAOS_WORKER.exists(), reason="make test-e2e builds chaos_worker")


def prompt(i):
    return [i + 1, 2 * i + 1, 7] * (1 + 20 * i)


@pytest.fixture(scope="module")
def want(sim):
    return {i: sim.text(prompt(i), seed=i, **PARAMS) for i in range(N_STREAMS)}


class Chaos:
    """A daemon whose workers follow a plan."""

    def __init__(self, daemons, tmp_path, plan, *flags):
        (tmp_path / "lives").unlink(missing_ok=True)
        self.daemon = daemons("--device", "sim", "--sim-step-us", "2000", "--worker-path", CHAOS_WORKER,
                              "--worker-stall-timeout-s", str(1 if not IS_SANITIZED else 3), *flags,
                              env={"PAGED_CHAOS": plan, "PAGED_CHAOS_COUNT": str(tmp_path / "lives")})
        self.out = {}

    def run(self, want):
        def one(i):
            text = ""
            for event in self.daemon.stream(prompt(i), seed=i, **PARAMS):
                assert "error" not in event, event
                text += "".join(c["text"] for c in event["choices"])
            self.out[i] = text

        threads = [threading.Thread(target=one, args=(i,)) for i in range(N_STREAMS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60 * SLOW)
        assert self.out == want, self.daemon.log()
        self.daemon.wait_ready_again()
        self.daemon.idle()

    def restarts(self):
        text = self.daemon.request("GET", "/metrics")[2]
        found = re.findall(r'^paged_worker_restarts_total\{.*reason="(\w+)"\} (\d+)$', text, re.M)
        assert len(found) == 9
        return {reason: int(n) for reason, n in found if n != "0"}


ENDS = {"kill": "signal", "exit0": "exit", "exit1": "exit"}
LASTING = ("stop", "close", "hang")
STARTING = ["before-challenge", "after-challenge", "after-attach", "before-hello", "after-hello", "after-load", "before-load_progress",
            "after-load_progress", "before-load_done", "after-load_done", "after-kv_config", "before-kv_ready", "after-kv_ready"]


def starting_cases():
    """Every point with one way to end, and each way that a time-out must find at one point; or everything everywhere."""
    rng = random.Random(3)
    for i, point in enumerate(STARTING):
        ends = list(ENDS)
        yield from ((action, point) for action in (ends if FULL else [ends[i % 3]]))
    for action in LASTING:
        points = STARTING[4:] if FULL else rng.sample(STARTING[4:], 1)  # before hello it takes half a minute
        yield from ((action, point) for point in points)


@pytest.mark.parametrize("action,point", list(starting_cases()))
def test_trouble_while_starting(daemons, tmp_path, want, action, point):
    """The streams run in the first life, which is killed, and wait while the second comes into trouble, and the third does not."""
    c = Chaos(daemons, tmp_path, f"1:kill@after-result.5,2:{action}@{point}", "--step-timeout-s", "3")
    c.run(want)
    restarts = c.restarts()
    assert sum(restarts.values()) == 2, c.daemon.log()
    assert restarts.pop("signal") == (2 if action == "kill" else 1)
    if action != "kill" and action in ENDS:
        assert restarts[ENDS[action]] == 1
    elif action == "close":
        assert restarts.keys() <= {"closed", "exit"}


RUNNING = ["after-step.3", "before-result.3", "after-result.3", "before-heartbeat.2", "after-heartbeat.2"]


@pytest.mark.parametrize("point", RUNNING)
def test_trouble_while_running(daemons, tmp_path, want, point):
    """One life after the other ends at the same point in another way."""
    actions = ["kill", "exit0", "exit1", "close", "kill", "kill", "stop", "hang"]  # more than there may be without a step
    is_late = "heartbeat" in point  # one beat is half a second: the streams may be done
    plan = ",".join(f"{life}:{a}@{point}" for life, a in enumerate(actions, 1))
    c = Chaos(daemons, tmp_path, plan)
    for _ in range(4 if is_late else 1):
        c.run(want)
    if not is_late:
        restarts = c.restarts()
        # Its own heartbeat thread may see the closing before it is stopped, and end it.
        assert restarts["signal"] == 3 and restarts["exit"] + restarts.get("closed", 0) == 3 and restarts["stall"] == 2, restarts
        assert sum(restarts.values()) == len(actions), restarts


NONSENSE = ["drop", "twice", "flood", "epoch", "magic", "version", "type", "short", "long", "noise", "huge", "step", "token", "many", "stranger",
            "none"]


@pytest.mark.parametrize("part", range(4))
def test_nonsense_for_results(daemons, tmp_path, want, part):
    actions = NONSENSE[part::4]
    c = Chaos(daemons, tmp_path, ",".join(f"{life}:{a}@before-result.3" for life, a in enumerate(actions, 1)))
    c.run(want)
    restarts = c.restarts()
    assert sum(restarts.values()) == len(actions), restarts
    assert restarts["protocol"] == len([a for a in actions if a != "huge"]), restarts


@pytest.mark.parametrize("kind", ["hello", "load_progress", "load_done", "kv_ready", "heartbeat"])
def test_nonsense_for_others(daemons, tmp_path, want, kind):
    """In the life that follows a kill, so that streams wait for it."""
    actions = ["magic", "type", "short", "long", "noise", "huge", "twice", "flood"]
    for action in actions if FULL else random.Random(kind).sample(actions, 3):
        c = Chaos(daemons, tmp_path, f"1:kill@after-result.5,2:{action}@before-{kind}")
        c.run(want)
        is_numbers = action == "noise" and kind in ("load_progress", "kv_ready")  # any are valid
        if action in ("magic", "type", "short", "long", "noise") and kind != "heartbeat" and not is_numbers:
            assert c.restarts() == {"signal": 1, "protocol": 1}, c.daemon.log()
        c.daemon.stop()


@pytest.mark.parametrize("point", ["after-load", "after-kv_config", "after-step.3"])
def test_nonsense_from_the_engine(daemons, tmp_path, want, point):
    """Spoilt on its way: the worker says what it expected and is replaced, the streams go on."""
    actions = ["magic", "type", "short", "long", "noise", "version"]
    if point == "after-kv_config":
        actions.remove("type")  # it is one
    if "step" not in point:
        actions = random.Random(point).sample(actions, 5 if FULL else 3)  # each costs a wait before the next start, and six are the end
    plan = ",".join(f"{life}:{a}@{point}" for life, a in enumerate(actions, 2))
    c = Chaos(daemons, tmp_path, "1:kill@after-result.5," + plan, "--step-timeout-s", "3")
    c.run(want)
    assert c.restarts() == {"signal": 1, "error": len(actions)}, c.daemon.log()
    assert c.daemon.log().count("worker failed: ") == len(actions)


@pytest.mark.parametrize("action", ["kill", "exit0", "stop", "hang"])
def test_trouble_when_idle(daemons, tmp_path, want, action):
    """Pings find what no step would."""
    point = {"kill": "after-ping", "exit0": "before-pong", "stop": "after-pong", "hang": "before-pong"}[action]
    c = Chaos(daemons, tmp_path, f"1:{action}@{point}")
    c.daemon.wait_log("restart 1")
    wait_until(c.restarts)  # the log is ahead of what the daemon tells
    c.daemon.wait_ready_again()
    expected = {"kill": "signal", "exit0": "exit", "hang": "stall"}.get(action)
    assert expected is None or c.restarts() == {expected: 1}
    c.run(want)


@pytest.mark.parametrize("action", ["kill", "exit1", "stop", "hang"])
def test_trouble_at_shutdown(daemons, tmp_path, want, action):
    c = Chaos(daemons, tmp_path, f"1:{action}@after-shutdown")
    c.run(want)
    start = time.monotonic()
    c.daemon.stop()
    assert time.monotonic() - start < 5 * SLOW


def test_health_through_a_restart(daemons, tmp_path, want):
    """503 with a reason while nobody could serve; 200 again afterwards."""
    c = Chaos(daemons, tmp_path, "2:exit1@before-hello,3:exit1@before-hello")
    c.run(want)
    os.kill(c.daemon.worker_pid("chaos_worker"), 9)
    seen = set()
    end = time.monotonic() + 30 * SLOW
    while time.monotonic() < end:
        status, headers, body = c.daemon.request("GET", "/health")
        if status == 200 and seen:
            break
        if status == 503:
            assert headers["Retry-After"] and body["status"] in ("recovering", "starting", "loading")
            seen.add(body.get("reason", "").split(";")[0])
        time.sleep(0.005)
    assert any("exited with status 1" in reason for reason in seen), seen
    c.out.clear()
    c.run(want)
