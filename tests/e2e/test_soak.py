"""Many streams for a while, and every five seconds the worker is killed: no request fails, every output is the undisturbed one, and nothing is
left behind.

  PAGED_SOAK_S        seconds under fire (12)
  PAGED_SOAK_STREAMS  streams at a time (64)
  PAGED_SOAK_MODEL    a model, for --device cpu (none: --device sim)
"""
import asyncio
import json
import os
import random
import re
import signal
import time

from conftest import IS_SANITIZED, TINY

SOAK_S = float(os.environ.get("PAGED_SOAK_S", "12"))
N_STREAMS = int(os.environ.get("PAGED_SOAK_STREAMS", "64"))
MODEL = os.environ.get("PAGED_SOAK_MODEL")
KILL_EVERY_S = 5
N_KINDS = 24 if MODEL is None else 16


def make_bodies():
    """Kinds of requests: short and long, greedy and seeded, with a common beginning and without."""
    rng = random.Random(5)
    bodies = []
    for i in range(N_KINDS):
        words = ["And it came to pass", "The sea was calm that night, and the old man", "Of all the numbers", "Once"][i % 4]
        bodies.append({"prompt": words + f" number {i}" * (rng.randrange(1, 8) if i % 3 else 0), "ignore_eos": True, "seed": i,
                       "temperature": 0.0 if i % 2 else 0.9, "max_tokens": rng.randrange(20, 60 if MODEL else 200)})
    return bodies


async def stream(port, body):
    """The text of a streamed completion; anything but a complete answer raises."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read()
        text, usage, is_done = [], None, False
        async for line in reader:
            if line == b"data: [DONE]\n":
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += [choice["text"] for choice in event["choices"]]
                usage = event.get("usage") or usage
        assert is_done and usage["completion_tokens"] == body["max_tokens"], (is_done, usage)
        return "".join(text)
    finally:
        writer.close()


async def under_fire(daemon, bodies, want, seconds):
    """Streams until the time is up, kills meanwhile; how many requests and kills there were."""
    end = time.monotonic() + seconds
    n_requests = n_kills = 0

    async def client(i):
        nonlocal n_requests
        rng = random.Random(i)
        while time.monotonic() < end:
            kind = rng.randrange(N_KINDS)
            assert await stream(daemon.port, bodies[kind]) == want[kind], kind
            n_requests += 1

    async def killer():
        nonlocal n_kills
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            pids = []
            for task in os.listdir(f"/proc/{daemon.process.pid}/task"):  # it is the core thread's child
                with open(f"/proc/{daemon.process.pid}/task/{task}/children") as f:
                    pids += f.read().split()
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
                n_kills += 1

    killing = asyncio.create_task(killer())
    try:
        await asyncio.gather(*(client(i) for i in range(N_STREAMS)))
    finally:
        killing.cancel()
    return n_requests, n_kills


def rss_kb(pid):
    with open(f"/proc/{pid}/status") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def test_soak(daemons):
    flags = [] if MODEL else ["--device", "sim", "--sim-step-us", "30000"]
    d = daemons(*flags, "--max-num-seqs", str(max(N_STREAMS, 8)), "--max-queued-requests", str(2 * N_STREAMS + 16), "--max-model-len", "1024",
                model=MODEL or TINY)

    async def undisturbed():
        return await asyncio.gather(*(stream(d.port, body) for body in bodies))

    bodies = make_bodies()
    want = dict(enumerate(asyncio.run(undisturbed())))
    assert d.metrics()["paged_worker_restarts_total"] == 0
    asyncio.run(under_fire(d, bodies, want, min(SOAK_S / 2, 6 * KILL_EVERY_S)))  # what memory it will ever take, it takes now
    d.wait_ready_again()
    d.idle(30)
    before_kb = rss_kb(d.process.pid)
    n_requests, n_kills = asyncio.run(under_fire(d, bodies, want, SOAK_S))
    d.wait_ready_again()
    m = d.idle(30)
    after_kb = rss_kb(d.process.pid)
    print(f"requests={n_requests} kills={n_kills} rss_kb={before_kb}->{after_kb}")
    assert n_requests > 0 and n_kills >= int(SOAK_S / KILL_EVERY_S) - 1
    assert m["paged_worker_restarts_total"] >= n_kills
    assert m["paged_http_connections"] == 1
    assert IS_SANITIZED or after_kb <= before_kb * 1.05, (before_kb, after_kb)
