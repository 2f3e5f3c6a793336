"""KV blocks that come back from the host tier and from disk: same answers, whatever was evicted, killed or restarted in between.

Every answer is held against a daemon without tiers. A request tells where its cached tokens were; blocks go to the host tier while later
steps run, so whoever wants to find them there asks until they are."""
import concurrent.futures
import fcntl
import os
import random
import re
import signal
import time

import pytest
from conftest import ROOT, SLOW, TINY, Daemon, kept_region, wait_until
from test_attach import workers  # noqa: F401

MODELS = ROOT / "tests" / "data" / "models"
SHM = "/dev/shm"
PARAMS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True, "return_cached_tokens_details": True}
# Time for tokens, so that loading is worth it.
SIM = ("--device", "sim", "--sim-step-us", "200", "--sim-token-us", "100", "--max-model-len", "1024", "--max-num-batched-tokens", "128")
# The model, how it is run with few blocks, and tokens it has.
KINDS = {
    "sim": (TINY, (*SIM, "--num-kv-blocks", "40"), 2000),
    "sim-hybrid": (TINY, (*SIM, "--sim-kv-layers", "full*2,sliding:64,sliding:64", "--num-kv-blocks", "60"), 2000),
    "tiny": (TINY, ("--max-model-len", "512", "--threads", "1", "--num-kv-blocks", "40"), 400),
    "hybrid": (MODELS / "gemma3-tiny", ("--max-model-len", "512", "--threads", "1", "--num-kv-blocks", "150"), 400),
}


def prompts(kind, n, n_tokens=300):
    rng = random.Random(n)
    vocab = KINDS[kind][2]
    return [[rng.randrange(vocab) for _ in range(n_tokens)] for _ in range(n)]


def ask(daemon, prompt, **params):
    """What it answers, bits included, and how many tokens each tier had."""
    status, _, answer = daemon.request("POST", "/v1/completions", {"prompt": prompt, "logprobs": 1, **PARAMS, **params}, timeout=120)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    choice = answer["choices"][0]
    return (choice["token_ids"], choice["logprobs"]["token_logprobs"] if choice["logprobs"] else None), details


def reset(daemon, query=""):
    wait_until(lambda: daemon.request("POST", "/reset_prefix_cache" + query)[2] == {"reset": True})


def ask_until(daemon, prompt, want, tier, n_tokens=16, n_tries=100):
    """Asks again with nothing on the device until this tier has that many tokens; every answer must be right."""
    for _ in range(n_tries):
        reset(daemon)
        answer, details = ask(daemon, prompt)
        assert answer == want, daemon.log()
        if details[tier] >= n_tokens:
            return details
        time.sleep(0.02)
    raise AssertionError(f"never {n_tokens} tokens from {tier}: {details}\n{daemon.log()}")


def make(daemons, kind, *flags, memory="64M", **kwargs):
    model, base, _ = KINDS[kind]
    return daemons(*base, *(("--kv-offload-memory", memory) if memory else ()), *flags, model=model, **kwargs)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The answers of daemons without tiers and without a prefix cache, by kind."""
    known = {}

    def get(kind, prompts_):
        todo = [p for p in prompts_ if (kind, tuple(p)) not in known]
        if todo:
            model, base, _ = KINDS[kind]
            d = Daemon(tmp_path_factory.mktemp("plain"), *base, "--no-enable-prefix-caching", model=model)
            for p in todo:
                known[kind, tuple(p)] = ask(d, p)[0]
            d.stop()
        return [known[kind, tuple(p)] for p in prompts_]

    return get


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back(daemons, wanted, kind, policy):
    """Far more prefixes than the device holds, twice round."""
    asked = prompts(kind, 8)
    want = wanted(kind, asked)
    d = make(daemons, kind, "--kv-offload-policy", policy)
    for _ in range(2):
        found = [ask(d, p) for p in asked]
        assert [answer for answer, _ in found] == want, d.log()
    assert sum(details["host"] for _, details in found) >= 4 * 256, found
    assert ask_until(d, asked[0], want[0], "host", 256)["host"] >= 256


def test_device_and_host_are_reset_apart(daemons, wanted):
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    d = make(daemons, "sim")
    ask_until(d, asked[0], want[0], "host", 288)
    assert ask(d, asked[0])[1] == {"device": 288, "host": 0, "storage": 0}
    reset(d, "?reset_external=true")
    assert ask(d, asked[0]) == (want[0], {"device": 0, "host": 0, "storage": 0})
    ask_until(d, asked[0], want[0], "host", 288)
    for query in ("?reset_external=false", "?reset_external=0", "?other=1"):
        reset(d, query)
        assert ask(d, asked[0])[1]["host"] == 288
    assert d.request("POST", "/reset_prefix_cache?reset_external=perhaps")[0] == 400
    assert d.request("GET", "/health")[0] == 200


def test_only_what_is_asked_for_again_is_stored(daemons, wanted):
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    d = make(daemons, "sim", "--kv-offload-store-threshold", "3")
    for _ in range(2):
        reset(d)
        assert ask(d, asked[0])[1]["host"] == 0
    ask_until(d, asked[0], want[0], "host", 288)


# --- the worker goes ---


def test_tier_outlives_the_worker(daemons, wanted):
    asked = prompts("tiny", 3)
    want = wanted("tiny", asked)
    d = make(daemons, "tiny")
    for p, w in zip(asked, want):
        ask_until(d, p, w, "host", 288)
    d.kill_worker()
    d.wait_ready_again()
    for p, w in zip(asked, want):
        assert ask(d, p) == (w, {"device": 0, "host": 288, "storage": 0})


@pytest.mark.parametrize("kind", ["sim", "tiny", "hybrid"])
def test_worker_killed_during_transfers(daemons, wanted, kind):
    """With more requests than the device holds there are always stores and loads under way."""
    asked = prompts(kind, 8)
    want = wanted(kind, asked)
    d = make(daemons, kind)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, d, asked[i % 8]) for i in range(64 if kind == "sim" else 32)]
        for _ in range(3):
            n = d.metrics()["vllm:generation_tokens_total"]
            wait_until(lambda: d.metrics()["vllm:generation_tokens_total"] > n + 20 or all(a.done() for a in answers))
            d.kill_worker()
            d.wait_ready_again()
        for i, answer in enumerate(answers):
            assert answer.result()[0] == want[i % 8], d.log()
    d.idle()
    ask_until(d, asked[0], want[0], "host", 256)


def test_tier_is_emptied_for_a_worker_of_other_numbers(daemons, workers, wanted, tmp_path, monkeypatch):
    asked = prompts("tiny", 1)
    url = f"ipc://{tmp_path}/worker.sock"
    w = workers(url, device="cpu")
    # A layer of the reference kernels under sanitizers may take seconds: no stall.
    d = make(daemons, "tiny", "--worker", url, "--worker-stall-timeout-s", 10 * SLOW)
    ask_until(d, asked[0], wanted("tiny", asked)[0], "host", 288)
    for isa, n_emptied in ((None, 0), ("ref", 1), ("ref", 1)):
        if isa:
            monkeypatch.setenv("PGD_CPU_ISA", isa)
        w.kill()
        d.wait_log("; restart")
        w = workers(url, device="cpu")
        d.wait_ready_again()
        details = ask(d, asked[0])[1]
        assert len(re.findall("the tiers are emptied", d.log())) == n_emptied
        assert (details["host"] > 0) == (isa is None), d.log()
        if isa:
            break
    assert ask(d, asked[0])[1]["device"] == 288


# --- the engine goes ---


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("kind", ["sim", "tiny", "hybrid"])
def test_persists(daemons, wanted, tmp_path, kind, how):
    asked = prompts(kind, 4)
    want = wanted(kind, asked)
    flags = ("--kv-offload-persist", "--kv-hash-seed-file", tmp_path / "seed")
    for life in range(3):
        d = make(daemons, kind, *flags)
        for p, w in zip(asked, want):
            answer, details = ask(d, p)
            assert answer == w, d.log()
            assert details["host"] >= (256 if life > 0 else 0), d.log()
            ask_until(d, p, w, "host", 256)
        end(d, how)
    assert re.search(r"host tier .* restored=[1-9]", d.log())


def test_last_stores_are_not_lost(daemons, wanted, tmp_path):
    """An engine that is told to end right behind an answer stores what that has left."""
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    flags = ("--kv-offload-persist", "--kv-hash-seed-file", tmp_path / "seed")
    for host in (0, 288):
        d = make(daemons, "sim", *flags)
        assert ask(d, asked[0]) == (want[0], {"device": 0, "host": host, "storage": 0})
        d.stop()


def test_stops_with_transfers_under_way(daemons, wanted, tmp_path):
    asked = prompts("sim", 8)
    for timeout in ("0", "20"):
        d = make(daemons, "sim", "--shutdown-timeout-s", timeout, *disk_flags(tmp_path), memory="3M")
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(d.request, "POST", "/v1/completions", {"prompt": p, **PARAMS}) for p in asked * 4]
            n = d.metrics()["vllm:generation_tokens_total"]
            wait_until(lambda: d.metrics()["vllm:generation_tokens_total"] > n + 80)
            d.stop()
            assert {a.result()[0] for a in answers if a.exception() is None} <= {200, 503}


def test_kv_of_another_type_is_not_taken_up(daemons, wanted, tmp_path):
    asked = prompts("tiny", 1)
    want = wanted("tiny", asked)
    flags = ("--kv-offload-persist", "--kv-hash-seed-file", tmp_path / "seed")
    d = make(daemons, "tiny", *flags)
    ask_until(d, asked[0], want[0], "host", 288)
    d.stop()
    d = make(daemons, "tiny", *flags, "--kv-cache-dtype", "f32")
    assert len(re.findall(r"the host tier at \S+ is emptied: ", d.log())) == 1
    assert ask(d, asked[0])[1]["host"] == 0
    d.stop()
    d = make(daemons, "tiny", *flags)
    assert ask(d, asked[0])[0] == want[0]


def test_one_engine_has_what_persists(daemons, wanted, tmp_path):
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    flags = ("--kv-offload-persist", "--kv-hash-seed-file", tmp_path / "seed")
    a, b = make(daemons, "sim", *flags), make(daemons, "sim", *flags)
    assert "another engine has it" not in a.log() and "another engine has it" in b.log()
    for d in (a, b):
        ask_until(d, asked[0], want[0], "host", 288)
    end(a, signal.SIGKILL)
    a = make(daemons, "sim", *flags)
    assert ask(a, asked[0]) == (want[0], {"device": 0, "host": 288, "storage": 0})


# --- what is left behind ---


def test_nothing_is_left_in_shared_memory(daemons, workers, wanted, tmp_path):
    """A tier ends with its engine: at once with a worker of its own, after the next start when a worker apart needed a name for it."""
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    for how in (signal.SIGTERM, signal.SIGKILL):
        d = make(daemons, "sim")
        ask_until(d, asked[0], want[0], "host", 288)
        path = d.wait_log(r"host tier .* at (\S+)").group(1)
        assert path.startswith(f"/proc/{d.process.pid}/fd/") and "paged-kv (deleted)" in os.readlink(path)
        assert shm_files(d.process.pid) == []
        end(d, how)
    url = f"ipc://{tmp_path}/worker.sock"
    pids = []
    for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        w = workers(url)
        d = make(daemons, "sim", "--worker", url)
        ask_until(d, asked[0], want[0], "host", 288)
        assert len(shm_files(d.process.pid)) == 1
        assert not any(shm_files(pid) for pid in pids)
        pids.append(d.process.pid)
        end(d, how)
        w.wait()
    assert not any(shm_files(pid) for pid in pids)


def test_a_tier_that_is_not_wanted_any_more_is_told(daemons, tmp_path):
    """It stays, for it may be another engine's; who wants the memory back removes it."""
    flags = ("--kv-hash-seed-file", tmp_path / "seed")
    make(daemons, "sim", *flags, "--kv-offload-persist").stop()
    path = kept_region(tmp_path / "seed")
    n_bytes = path.stat().st_size
    for memory in ("64M", None):
        d = make(daemons, "sim", *flags, memory=memory)
        assert f"{path} holds {path.stat().st_blocks * 512 >> 20} MB" in d.log()
        d.stop()
    assert path.stat().st_size == n_bytes
    path.unlink()
    for more in ((), ("--kv-offload-persist",)):
        d = make(daemons, "sim", *flags, *more)
        assert "for a start with kv_offload_persist" not in d.log()
        d.stop()


def test_nobody_else_may_read_what_is_kept(daemons, tmp_path):
    """Whatever the umask is: the secret of the hashes, both tiers, and the sockets."""
    sockets = ("--kv-events-url", f"ipc://{tmp_path}/run/events", "--kv-events-replay-url", f"ipc://{tmp_path}/run/replay")
    (tmp_path / "run").mkdir(mode=0o700)
    old = os.umask(0)
    try:
        d = make(daemons, "sim", "--kv-offload-persist", *disk_flags(tmp_path), *sockets)
    finally:
        os.umask(old)
    d.complete([11] * 200, max_tokens=1)
    wait_until(lambda: any(path.stat().st_size > 4096 for path in (tmp_path / "kv").glob("??/*")))
    kept = [tmp_path / "seed", kept_region(tmp_path / "seed"), *tmp_path.glob("run/*"), tmp_path / "kv", *tmp_path.glob("kv/**/*")]
    assert len(kept) > 260 and sum(path.is_socket() for path in kept) == 3
    for path in kept:
        mode = path.lstat().st_mode
        if path.parent == tmp_path / "run" and path.name.startswith("worker-"):
            continue  # its directory is closed to others
        assert mode & 0o777 == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


@pytest.mark.parametrize("mode, is_open", [(0o600, False), (0o640, False), (0o644, True), (0o660, True)])
def test_a_seed_file_that_others_may_read_is_told(daemons, tmp_path, mode, is_open):
    (tmp_path / "seed").write_bytes(os.urandom(32))
    (tmp_path / "seed").chmod(mode)
    d = make(daemons, "sim", "--kv-hash-seed-file", tmp_path / "seed")
    assert bool(re.search(f"warn .*others may read.*{tmp_path}/seed", d.log())) == is_open


# --- disk ---


def on_disk(daemon):
    return daemon.metrics().get("paged_kv_tier_used_bytes", 0)


def disk_flags(tmp_path, size="64M"):
    return "--kv-offload-dir", tmp_path / "kv", "--kv-offload-disk", size, "--kv-hash-seed-file", tmp_path / "seed"


@pytest.mark.parametrize("kind", ["sim", "tiny", "hybrid"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_disk_outlives_the_engine(daemons, wanted, tmp_path, kind, how):
    """What left host memory, or was there only when the engine ended, comes from disk."""
    asked = prompts(kind, 2)
    want = wanted(kind, asked)
    for life in range(2):
        d = make(daemons, kind, *disk_flags(tmp_path))
        if life == 0:
            for p, w in zip(asked, want):
                ask_until(d, p, w, "host", 256)
            wait_quiet(tmp_path / "kv")
        else:
            d.wait_log("disk: ready ")
            found = [ask(d, p) for p in asked]
            assert [answer for answer, _ in found] == want
            assert sum(details["storage"] for _, details in found) >= 256, d.log()
        end(d, how)


def test_disk_behind_a_host_tier_that_is_too_small(daemons, wanted, tmp_path):
    asked = prompts("sim", 4)
    want = wanted("sim", asked)
    d = make(daemons, "sim", *disk_flags(tmp_path), "--sim-token-us", "500", memory="2M")
    for _ in range(3):
        for p, w in zip(asked, want):
            reset(d)
            assert ask(d, p)[0] == w
        wait_quiet(tmp_path / "kv")
    n = 0
    for p, w in zip(asked, want):
        reset(d)
        answer, details = ask(d, p)
        assert answer == w
        n += details["storage"]
    assert n >= 2 * 256


def test_two_engines_share_a_directory(daemons, wanted, tmp_path):
    asked = prompts("sim", 2)
    want = wanted("sim", asked)
    a, b = (make(daemons, "sim", *disk_flags(tmp_path)) for _ in range(2))
    for d, other, p, w in ((a, b, asked[0], want[0]), (b, a, asked[1], want[1])):
        ask_until(d, p, w, "host", 256)
        wait_quiet(tmp_path / "kv")
        ask_until(other, p, w, "storage", 256, n_tries=20)


def test_reset_of_tiers_on_disk_too(daemons, wanted, tmp_path):
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    d = make(daemons, "sim", *disk_flags(tmp_path))
    ask_until(d, asked[0], want[0], "host", 288)
    wait_quiet(tmp_path / "kv")
    reset(d, "?reset_external=true")
    assert ask(d, asked[0]) == (want[0], {"device": 0, "host": 0, "storage": 0})
    wait_quiet(tmp_path / "kv")
    d.stop()
    d = make(daemons, "sim", *disk_flags(tmp_path))
    assert ask(d, asked[0])[0] == want[0]


def test_goes_on_while_another_engine_holds_the_account(daemons, wanted, tmp_path):
    """One that was stopped in the wrong moment: nothing is written to disk, and a reset says why it cannot be."""
    asked = prompts("sim", 2)
    want = wanted("sim", asked)
    d = make(daemons, "sim", *disk_flags(tmp_path))
    d.wait_log("disk: ready ")
    with open(tmp_path / "kv" / "accounts", "r+b") as accounts:
        fcntl.lockf(accounts, fcntl.LOCK_EX, 1)
        for p, w in zip(asked, want):
            ask_until(d, p, w, "host", 256)
        d.idle()
        answer = d.request("POST", "/reset_prefix_cache?reset_external=true")[2]
        assert answer["reset"] is False and "tiers" in answer["reason"], answer
        assert ask(d, asked[0]) == (want[0], {"device": 0, "host": 288, "storage": 0})
    wait_quiet(tmp_path / "kv")
    reset(d, "?reset_external=true")
    assert ask(d, asked[0]) == (want[0], {"device": 0, "host": 0, "storage": 0})


def test_damaged_files_are_misses(daemons, wanted, tmp_path):
    asked = prompts("sim", 1)
    want = wanted("sim", asked)
    d = make(daemons, "sim", *disk_flags(tmp_path))
    ask_until(d, asked[0], want[0], "host", 288)
    wait_quiet(tmp_path / "kv")
    d.stop()
    rng = random.Random(1)
    files = [f for f in (tmp_path / "kv").rglob("*") if f.is_file() and f.stat().st_size > 4096]
    assert files
    for f in files:
        data = bytearray(f.read_bytes())
        at = rng.randrange(len(data))
        f.write_bytes(data[:at] if rng.random() < 0.5 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    d = make(daemons, "sim", *disk_flags(tmp_path))
    for _ in range(3):
        reset(d)
        assert ask(d, asked[0])[0] == want[0]
    assert d.request("GET", "/health")[0] == 200


def wait_quiet(folder):
    """Until nothing more is written there."""
    seen, since = None, time.monotonic()
    end = since + 20 * SLOW
    while time.monotonic() < since + 0.3 and time.monotonic() < end:
        now = sorted((f.name, f.stat().st_size) for f in folder.rglob("*-*") if f.is_file())
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.03)


# --- start ---


@pytest.mark.parametrize("flags,told", [
    (("--kv-offload-memory", "60T"), "MB, the memory of this machine or the limit of this service, got 62914560 MB"),
    (("--kv-offload-memory", "{too_much}M", "--kv-offload-persist", "--kv-hash-seed-file", "{tmp}/seed"), "the size of /dev/shm, got"),
    (("--kv-offload-memory", "1K"), "kv_offload_memory: expected room for a block of"),
    (("--kv-offload-memory", "1M", "--worker", "tcp://192.0.2.1:7000", "--worker-token-file", "{tmp}/token"),
     "expected a worker on this host"),
    (("--kv-offload-memory", "1M", "--kv-offload-dir", "{tmp}/no/kv", "--kv-offload-disk", "1G"), "{tmp}/no/kv"),
    (("--kv-offload-memory", "1M", "--no-enable-prefix-caching"), "expected enable_prefix_caching too"),
])
def test_mistakes_end_at_start(daemons, tmp_path, flags, told):
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    (tmp_path / "token").chmod(0o600)
    shm = os.statvfs(SHM)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    known = {"tmp": tmp_path, "too_much": (shm.f_blocks * shm.f_frsize >> 20) + 1, "total": total}
    if "{too_much}" in flags[1] and known["too_much"] > total:
        pytest.skip("/dev/shm is as large as the memory")
    d = daemons("--device", "sim", *(f.format(**known) for f in flags), wait=False)
    d.process.wait(20 * SLOW)
    d.stop(expect=64)
    assert told.format(**known) in d.log(), d.log()


def test_an_encoder_has_nothing_to_keep(daemons):
    d = daemons("--kv-offload-memory", "1M", model=MODELS / "bart-tiny")
    assert "no kv_offload_memory: " in d.log()
    assert d.complete("a", max_tokens=1)


def end(daemon, how=signal.SIGTERM):
    if how == signal.SIGTERM:
        daemon.stop()
        return
    daemon.process.kill()
    daemon.process.wait()
    daemon.log_file.close()


def shm_files(pid):
    """Of an engine, those that do not persist."""
    return [name for name in os.listdir(SHM) if name.startswith(f"paged-kv-{os.geteuid()}-tmp-{pid}-")]
