"""KV events: what subscribers rebuild from them is what the daemon finds."""
import contextlib
import json
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import pynng
import pytest
import zmq

from conftest import PAGED, ROOT, SLOW, free_port, wait_until
from kv_events import Subscriber, apply, decode

BLOCK = 16


def urls(tmp_path):
    return f"ipc://{tmp_path}/events.sock", f"ipc://{tmp_path}/replay.sock"


def make(daemons, tmp_path, *flags):
    url, replay_url = urls(tmp_path)
    return daemons("--device", "sim", "--sim-step-us", "200", "--kv-events-url", url, "--kv-events-replay-url", replay_url,
                   "--kv-events-topic", "kv", *flags)


def subscribe(tmp_path, **kwargs):
    return Subscriber(*urls(tmp_path), topic="kv", **kwargs)


def prompts(seed, n):
    """Token ids with common beginnings, of many lengths."""
    rng = random.Random(seed)
    stems = [[rng.randrange(10, 200) for _ in range(rng.randrange(1, 120))] for _ in range(5)]
    return [rng.choice(stems) + [rng.randrange(10, 200) for _ in range(rng.randrange(1, 90))] for _ in range(n)]


def load(d, seed, n=24, threads=4):
    todo = prompts(seed, n)
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                if not todo:
                    return
                prompt = todo.pop()
            d.complete(prompt, max_tokens=1 + len(prompt) % 20, temperature=0)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for t in workers:
        t.start()
    return workers


def join(workers):
    for t in workers:
        t.join()


def cached(d, prompt):
    return d.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]


def check_found(d, subscribers, seed, n=6):
    """Each subscriber predicts what a prompt hits."""
    n_hits = 0
    for prompt in prompts(seed, n):
        d.idle()
        for s in subscribers:
            s.sync()
        told = {s.predict(prompt, BLOCK) for s in subscribers}
        found = cached(d, prompt)
        assert told == {found}
        n_hits += found > 0
    return n_hits


def test_events_rebuild_what_is_cached(daemons, tmp_path):
    d = make(daemons, tmp_path, "--num-kv-blocks", "48")
    early = subscribe(tmp_path)
    join(load(d, 1))
    n_hits = check_found(d, [early], 1)
    m = d.metrics()
    assert m["paged_kv_events_batches_total"] == len(early.batches) and m["paged_kv_events_dropped_total"] == 0
    assert m["paged_kv_events_total"] == sum(len(b.events) for _, b in early.batches)
    names = [type(e).__name__ for _, b in early.batches for e in b.events]
    assert "BlockStored" in names and "BlockRemoved" in names and "AllBlocksCleared" not in names
    assert [seq for seq, _ in early.batches] == list(range(len(early.batches)))
    # One that comes late, under load.
    workers = load(d, 2)
    late = subscribe(tmp_path, late=True)
    join(workers)
    n_hits += check_found(d, [early, late], 2)
    assert early.held("GPU") == late.held("GPU") and early.snapshots == 0 and late.snapshots == 1
    # The worker's death forgets all, in one word.
    n = len(early.batches)
    workers = load(d, 3)
    d.kill_worker()
    d.wait_ready_again()
    join(workers)
    n_hits += check_found(d, [early, late], 3)
    assert [type(e).__name__ for _, b in early.batches[n:] for e in b.events].count("AllBlocksCleared") == 1
    assert early.known.keys() == late.known.keys()
    # So does a reset.
    d.idle()
    assert d.request("POST", "/reset_prefix_cache")[2] == {"reset": True}
    early.sync()
    late.sync()
    assert early.known == {} and late.known == {}
    n_hits += check_found(d, [early, late], 4)
    assert n_hits > 10
    # Blocks of equal content are told once, so there may be more blocks than names.
    assert len(early.held("GPU")) <= d.idle()["paged_kv_blocks_cached"]
    early.close()
    late.close()


def test_salt_and_parents_are_told(daemons, tmp_path):
    d = make(daemons, tmp_path)
    s = subscribe(tmp_path)
    prompt = list(range(10, 10 + 3 * BLOCK + 1))
    d.complete(prompt, max_tokens=1, cache_salt="pepper")
    s.sync()
    stored = s.batches[0][1].events[0]
    assert stored.token_ids == prompt[:-1] and stored.block_size == BLOCK and stored.parent_block_hash is None
    assert stored.extra_keys == [("pepper",), None, None]
    assert (stored.medium, stored.lora_id, stored.group_idx, stored.kv_cache_spec_kind) == ("GPU", None, 0, "full_attention")
    late = subscribe(tmp_path, late=True)
    assert late.known == s.known and len(s.known) == 3
    s.close()
    late.close()


def test_groups_tell_kind_and_window(daemons, tmp_path):
    d = make(daemons, tmp_path, "--sim-kv-layers", "full,sliding:20")
    s = subscribe(tmp_path)
    d.complete(list(range(10, 150)), max_tokens=4)
    s.sync()
    told = {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for _, b in s.batches for e in b.events}
    assert told == {(0, "full_attention", None), (1, "sliding_window", 20)}
    late = subscribe(tmp_path, late=True)
    assert late.known == s.known
    s.close()
    late.close()


def test_replay_and_bad_requests(daemons, tmp_path):
    d = make(daemons, tmp_path, "--kv-events-buffer-batches", "3")
    s = subscribe(tmp_path)
    for i in range(6):
        d.complete([10 + i] * 40, max_tokens=1)
        s.sync()
    assert s.next_seq == 6

    def replay(seq):
        answer = s.ask(b"R" + struct.pack(">Q", seq))
        at, found = 9, []
        while at < len(answer):
            seq, n = struct.unpack(">QI", answer[at:at + 12])
            found.append((seq, answer[at + 12:at + 12 + n]))
            at += 12 + n
        assert at == len(answer)
        return found

    assert [seq for seq, _ in replay(4)] == [4, 5, 2**64 - 1]
    assert [seq for seq, _ in replay(0)] == [3, 4, 5, 2**64 - 1]  # older ones are gone, which shows
    assert replay(6) == replay(2**63 - 1) == [(2**64 - 1, b"")]
    assert decode(replay(5)[0][1]) == s.batches[5][1]
    rng = random.Random(5)
    for bad in (b"", b"R", b"S", b"R" + b"\xff" * 8, b"R" + bytes(9), b"S" + bytes(5), b"\0" * 8, b"x" * 60,
                *(rng.randbytes(rng.randrange(50)) for _ in range(50))):
        if (bad[:1], len(bad)) not in ((b"R", 9), (b"S", 5)) or bad[1:2] >= b"\x80":
            answer = s.ask(bad)
            assert answer.startswith(b"Eexpected R and a sequence number") or bad[:1] == b"S"
    assert decode(s.ask(b"S\xff\xff\xff\xfe")[21:]).events == []  # a cursor behind the end
    # One that is too long ends its connection; others are served.
    with pynng.Req0(dial=urls(tmp_path)[1], recv_timeout=200) as rude:
        rude.send(b"R" * 10000)
        with pytest.raises(pynng.Timeout):
            rude.recv()
    assert len(replay(0)) == 4
    d.complete([99] * 40, max_tokens=1)
    s.sync()
    assert s.next_seq == 7 and s.snapshots == 0
    s.close()


def test_subscribers_notice_a_restart(daemons, tmp_path):
    d = make(daemons, tmp_path)
    s = subscribe(tmp_path)
    d.complete([11] * 200, max_tokens=1)
    s.sync()
    assert len(s.held("GPU")) == 12
    d.stop()
    d = make(daemons, tmp_path)
    wait_until(lambda: s.sub.pipes and s.req.pipes)
    # As many batches as before: the numbers alone would not tell.
    for i in range(len(s.batches)):
        d.complete([12 + i] * 40, max_tokens=1)
    d.complete([200] * 40, max_tokens=1)
    s.sync()
    late = subscribe(tmp_path, late=True)
    assert s.snapshots == 1 and s.known.keys() == late.known.keys()
    s.close()
    late.close()


@pytest.mark.parametrize("flags, told", [
    (("--kv-events-url", "udp://x"), "kv_events_url"),
    (("--kv-events-url", "tcp://127.0.0.1"), "kv_events_url: expected tcp://HOST:PORT"),
    (("--kv-events-url", "ipc:///nowhere/at/all"), "kv_events_url: cannot listen at ipc:///nowhere/at/all"),
    (("--kv-events-url", "ipc://{dir}/a", "--kv-events-replay-url", "x"), "kv_events_replay_url"),
    (("--kv-events-replay-url", "ipc://{dir}/a"), "kv_events_replay_url: expected kv_events_url too"),
    (("--kv-events-url", "ipc://{dir}/a", "--kv-events-topic", "a\tb"), "kv_events_topic: expected printable"),
])
def test_start_up_errors_name_the_option(tmp_path, flags, told):
    flags = [f.format(dir=tmp_path) for f in flags]
    done = subprocess.run([PAGED, "serve", "--device", "sim", "--port", "0", "--runtime-dir", tmp_path / "run", "--model",
                           ROOT / "config/models/paged-tiny.gguf", *flags], capture_output=True, text=True, timeout=20 * SLOW)
    assert done.returncode not in (0, -6, -11) and told in done.stderr, done.stderr


@pytest.mark.parametrize("flags", [("--kv-events-url", "ipc://{file}"),
                                   ("--kv-events-url", "ipc://{file}.sock", "--kv-events-replay-url", "ipc://{file}")])
def test_a_file_in_the_place_of_a_socket_stays(tmp_path, flags):
    path = tmp_path / "precious"
    path.write_text("kept")
    test_start_up_errors_name_the_option(tmp_path, [f.format(file=path) for f in flags], f"{flags[-2][2:].replace('-', '_')}: cannot listen: expected")
    assert path.read_text() == "kept"


def test_beyond_loopback_is_warned_about(daemons, tmp_path):
    d = daemons("--device", "sim", "--kv-events-url", f"tcp://0.0.0.0:{free_port()}")
    assert re.search(r"warn .*listening beyond loopback: whoever reaches tcp://0\.0\.0\.0", d.log(), re.I), d.log()


class Router:
    """Reads ZeroMQ as a router of vLLM's events does: SUB for the stream, DEALER for replays."""

    made = []  # to be closed even if a test fails: a context that is collected waits for its sockets

    def __init__(self, url, replay_url, topic="kv"):
        self.made.append(self)
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(url)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(replay_url)
        self.known, self.tags, self.next_seq = {}, [], 0

    def close(self):
        self.context.destroy(linger=0)

    def take(self, seq, payload):
        if seq < self.next_seq:
            return
        assert seq == self.next_seq, "a gap"
        self.next_seq = seq + 1
        batch = decode(payload)
        for e in batch.events:  # parents come first
            if type(e).__name__ == "BlockStored" and e.token_ids and e.parent_block_hash is not None:
                assert (e.medium, e.group_idx, e.parent_block_hash) in self.known
            apply(self.known, type(batch)(batch.ts, [e]))
        self.tags += [type(e).__name__ for e in batch.events]

    def replay(self, from_seq):
        self.dealer.send_multipart((b"", struct.pack(">Q", from_seq)))
        found = []
        while True:
            assert self.dealer.poll(10000 * SLOW)
            empty, seq, payload = self.dealer.recv_multipart()
            assert empty == b""
            if seq == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(seq, "big"), payload))

    def follow(self, wait_ms=100):
        while self.sub.poll(wait_ms):
            topic, seq, payload = self.sub.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(seq, "big") > self.next_seq:
                for old in self.replay(self.next_seq):
                    self.take(*old)
            self.take(int.from_bytes(seq, "big"), payload)


@pytest.fixture
def bridges():
    made = []

    def make(tmp_path, *flags):
        url, replay_url = urls(tmp_path)
        out = f"ipc://{tmp_path}/zmq.sock", f"ipc://{tmp_path}/zmq-replay.sock"
        made.append(subprocess.Popen([sys.executable, ROOT / "scripts" / "kv_events_zmq", "--events", url, "--replay", replay_url, "--topic", "kv",
                                      "--publish", out[0], "--publish-replay", out[1], *flags], stderr=subprocess.PIPE, text=True))
        return made[-1], out

    yield make
    while Router.made:
        Router.made.pop().close()
    for process in made:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in err, err


def test_zmq_bridge(daemons, bridges, tmp_path):
    d = make(daemons, tmp_path, "--num-kv-blocks", "48")
    join(load(d, 1, n=12))
    reference = subscribe(tmp_path, late=True)
    bridge, out = bridges(tmp_path, "--buffer-batches", "60")
    router = Router(*out)
    join(load(d, 2, n=12))
    wait_until(lambda: router.replay(0))  # it is at work
    for batch in router.replay(0):
        router.take(*batch)

    def is_same():
        router.follow()
        reference.sync()
        return router.known == reference.known

    wait_until(is_same)
    join(load(d, 5, n=12))
    wait_until(is_same)
    assert router.known and "BlockRemoved" in router.tags and "AllBlocksCleared" not in router.tags
    # A worker's death, then a restart of paged: the bridge goes on.
    d.kill_worker()
    d.wait_ready_again()
    wait_until(is_same)
    assert router.known == {} and router.tags.count("AllBlocksCleared") == 1
    join(load(d, 3, n=8))
    wait_until(is_same)
    d.stop()
    d = make(daemons, tmp_path, "--num-kv-blocks", "48")
    join(load(d, 4, n=8))
    wait_until(is_same)
    assert router.known and reference.snapshots == 2
    # A router that comes too late for what is kept gets it all.
    i = 0
    while router.next_seq <= 70:  # on a busy machine several answers share a batch
        d.complete([20 + i % 400] * (BLOCK + 1), max_tokens=1)
        router.follow()
        i += 1
        assert i < 2000
    wait_until(is_same)
    late = Router(*out)
    kept = late.replay(0)
    late.next_seq = kept[0][0]
    assert late.next_seq > 0, len(kept)
    last_clear = max(i for i, (_, payload) in enumerate(kept) if b"AllBlocksCleared" in payload)
    late.next_seq = kept[last_clear][0]
    for seq, payload in kept[last_clear:]:
        late.take(seq, payload)
    assert late.known == reference.known
    wait_until(is_same)
    late.dealer.send_multipart((b"", b"short"))  # is left out, with a line
    assert late.replay(late.next_seq) == []
    for s in (router, late, reference):
        s.close()


@contextlib.contextmanager
def watching(*args):
    """`paged status --events`; its lines so far are in the list."""
    process = subprocess.Popen([str(PAGED), "status", *(str(a) for a in args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored where tests run in the background
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    try:
        yield process, lines
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        reader.join()
        assert process.returncode in (-signal.SIGINT, 69) and "Sanitizer" not in err, err


def test_status_prints_events(daemons, tmp_path):
    d = make(daemons, tmp_path)
    assert d.request("GET", "/version")[2]["kv_events"] == {"url": urls(tmp_path)[0], "replay_url": urls(tmp_path)[1], "topic": "kv"}
    with (watching("--events", "--url", d.url, "--json") as (_, objects), watching("--events-url", urls(tmp_path)[0]) as (process, lines)):
        prompt = [11] * 40
        wait_until(lambda: d.complete(prompt, max_tokens=1, cache_salt=str(len(prompt) + time.monotonic())) and objects and lines, 10)
        time.sleep(0.3)
        told = [json.loads(o) for o in objects]
        first = told[0]
        assert first["event"] == "stored" and first["medium"] == "GPU" and first["tokens"] == prompt[:32] and first["group"] == 0
        assert first["block_size"] == BLOCK and len(first["blocks"]) == 2 and first["attention"] == "full_attention"
        assert [o["seq"] for o in told] == list(range(told[0]["seq"], told[0]["seq"] + len(told)))
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} #\d+ stored  GPU group 0: 2 blocks, 32 tokens: [0-9a-f]{16} [0-9a-f]{16}\n", lines[0]), lines[0]
        assert f"{int(first['blocks'][0]):016x}" in "".join(lines) or first["seq"] < int(re.search(r"#(\d+)", lines[0])[1])
        d.idle()
        d.request("POST", "/reset_prefix_cache")
        wait_until(lambda: any("cleared" in line for line in lines) and any("cleared" in o for o in objects))
        d.stop()
        wait_until(lambda: process.poll() == 69)  # it says so rather than wait for ever
    done = subprocess.run([PAGED, "status", "--events-url", urls(tmp_path)[0]], capture_output=True, text=True, timeout=10)
    assert done.returncode == 69 and urls(tmp_path)[0] in done.stderr
    silent = daemons("--device", "sim")
    done = subprocess.run([PAGED, "status", "--events", "--url", silent.url], capture_output=True, text=True, timeout=10)
    assert done.returncode == 64 and "--kv-events-url" in done.stderr
    done = subprocess.run([PAGED, "status", "--events", "--url", f"http://127.0.0.1:{free_port()}"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 69


def test_status_finds_events_on_all_interfaces(daemons):
    port = free_port()
    d = daemons("--device", "sim", "--kv-events-url", f"tcp://*:{port}")
    with watching("--events", "--url", d.url, "--json") as (_, objects):
        wait_until(lambda: d.complete([11] * 40, max_tokens=1, cache_salt=str(time.monotonic())) and objects, 10)


def in_tier(d):
    """Blocks of the host tier."""
    block_bytes = int(re.search(r"host tier blocks=\d+ block_bytes=(\d+)", d.log())[1])
    return d.metrics()["paged_kv_offload_used_bytes"] / block_bytes


def test_tiers(daemons, tmp_path):
    """The host tier outlives the worker, and subscribers know."""
    d = make(daemons, tmp_path, "--num-kv-blocks", "40", "--kv-offload-memory", "16M")
    early = subscribe(tmp_path)
    join(load(d, 1))
    d.idle()

    def is_told():
        early.sync()
        return len(early.held("CPU")) == in_tier(d) > 0

    wait_until(is_told)
    assert early.held("GPU") - early.held("CPU") or early.held("CPU") - early.held("GPU")
    workers = load(d, 2)
    late = subscribe(tmp_path, late=True)
    join(workers)
    d.idle()
    wait_until(is_told)
    late.sync()
    assert early.known.keys() == late.known.keys() and early.snapshots == 0
    n = len(early.batches)
    in_host = early.held("CPU")
    d.kill_worker()
    d.wait_ready_again()
    wait_until(is_told)
    assert early.held("GPU") == set() and early.held("CPU") == in_host
    told = [type(e).__name__ for _, b in early.batches[n:] for e in b.events]
    assert told and set(told) == {"BlockRemoved"}
    late.sync()
    assert late.known.keys() == early.known.keys()
    # What only the tier has is found by its name, and told with tokens in a snapshot as long as they are known.
    newest = subscribe(tmp_path, late=True)
    told = {newest.predict(prompt, BLOCK, ("CPU",)) for prompt in prompts(2, 6)}
    assert max(told) > 0
    assert d.request("POST", "/reset_prefix_cache?reset_external=true")[2] == {"reset": True}
    for s in (early, late, newest):
        s.sync()
        assert s.known == {}
        s.close()


def test_a_tier_that_was_there_before_is_told(daemons, tmp_path):
    flags = ("--kv-offload-memory", "16M", "--kv-offload-persist", "--kv-hash-seed-file", tmp_path / "seed")
    d = make(daemons, tmp_path, *flags)
    d.complete([11] * 200, max_tokens=1)
    wait_until(lambda: in_tier(d) == 12)
    d.stop()
    d = make(daemons, tmp_path, *flags)
    s = subscribe(tmp_path, late=True)
    wait_until(lambda: s.sync() or len(s.held("CPU")) == 12)
    assert s.held("GPU") == set()
    d.complete([11] * 200, max_tokens=1)
    s.sync()
    assert s.held("GPU") == s.held("CPU")
    s.close()


def test_disk_is_told_whoever_wrote(daemons, tmp_path):
    flags = ("--kv-offload-memory", "16M", "--kv-offload-dir", tmp_path / "kv", "--kv-offload-disk", "64M", "--kv-hash-seed-file", tmp_path / "seed")
    d = make(daemons, tmp_path, *flags)
    s = subscribe(tmp_path)
    d.complete([11] * 200, max_tokens=1)
    wait_until(lambda: s.sync() or len(s.held("DISK")) == 12)
    assert s.held("DISK") == s.held("CPU") == s.held("GPU")
    # Another engine shares the directory; this one is idle.
    other = daemons("--device", "sim", *flags)
    other.complete([12] * 200, max_tokens=1)
    wait_until(lambda: s.sync() or len(s.held("DISK")) == 24)
    for path in list((tmp_path / "kv").rglob("*"))[:]:
        if path.is_file() and path.stat().st_size > 4096 and len(path.name) > 40:
            path.unlink()
    wait_until(lambda: s.sync() or s.held("DISK") == set())
    assert len(s.held("CPU")) == 12
    s.close()
