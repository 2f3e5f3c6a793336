"""Models whose layers keep their KV differently: groups with block tables of their own over one pool.

The simulated worker draws the same tokens whatever its layers are, and ends itself when a table or a slot of any group is wrong: so every
answer is held against a worker with one full layer. Real models are held against the daemon that keeps every token in every layer."""
import concurrent.futures
import random
import re
import subprocess

import pytest
from conftest import PAGED, ROOT

MODELS = ROOT / "tests" / "data" / "models"
PARAMS = {"ignore_eos": True, "return_token_ids": True}


def make_requests(rng, n, vocab, max_prompt=300):
    stems = [[rng.randrange(vocab) for _ in range(max_prompt)] for _ in range(3)]
    requests = []
    for i in range(n):
        prompt = rng.choice(stems)[: rng.choice([0, 16, 100, 240, max_prompt])] + [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
        requests.append({"prompt": prompt, "max_tokens": rng.randrange(1, 120), "temperature": i % 2, "seed": i, **PARAMS})
    for i in range(6):  # admitted together, too large together
        requests.append({"prompt": [rng.randrange(vocab) for _ in range(10)], "max_tokens": 200, "temperature": 0.5, "seed": i, **PARAMS})
    return requests


def ask(daemon, request):
    status, _, answer = daemon.request("POST", "/v1/completions", request, timeout=120)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]


def ask_all(daemon, requests, n_kills=0):
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, daemon, r) for r in requests]
        for _ in range(n_kills):
            n = daemon.metrics()["vllm:generation_tokens_total"]
            while daemon.metrics()["vllm:generation_tokens_total"] < n + 60 and not all(a.done() for a in answers):
                pass
            daemon.kill_worker()
            daemon.wait_ready_again()
        return [a.result() for a in answers]


def check_pool(daemon, n_restarts):
    """What went before was preempted and restarted; a prompt that comes again is found."""
    m = daemon.idle()
    assert m["vllm:num_preemptions_total"] > 0 and m["paged_worker_restarts_total"] == n_restarts
    again = {"prompt": list(range(1, 46)), "max_tokens": 1, "temperature": 0, **PARAMS}
    assert ask(daemon, again)[0] == ask(daemon, again)[0]
    assert daemon.idle()["vllm:prefix_cache_hits_total"] >= m["vllm:prefix_cache_hits_total"] + 32


@pytest.fixture(scope="module")
def sim_requests(sim):
    requests = make_requests(random.Random(4), 24, 2000)
    return requests, ask_all(sim, requests)


# Blocks for one request of 512 tokens and little more, so that there are preemptions.
@pytest.mark.parametrize("layers,blocks", [("full,sliding:64", 50), ("sliding:40,full*2,sliding:40", 48), ("chunked:48,full", 50),
                                           ("sliding:50", 16)])
def test_tokens_are_those_of_one_group(daemons, sim_requests, layers, blocks):
    requests, want = sim_requests
    d = daemons("--device", "sim", "--sim-kv-layers", layers, "--max-model-len", "512", "--num-kv-blocks", str(blocks), "--sim-step-us", "500",
                "--max-num-batched-tokens", "64")
    assert ask_all(d, requests, n_kills=2) == want, d.log()
    check_pool(d, 2)


@pytest.mark.parametrize("model,blocks", [("gemma3-tiny", 92), ("mistral-swa-tiny", 14)])
def test_bits_are_those_of_full_groups(daemons, model, blocks):
    rng = random.Random(5)
    requests = [{**r, "logprobs": 2} for r in make_requests(rng, 12, 400)]
    flags = ["--max-model-len", "512", "--threads", "1"]
    kept = daemons(*flags, "--disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching", model=MODELS / model)
    assert re.search(r'kv group=0 kind="full" window=\d\d block_size=16', kept.log()) and "kv group=1" not in kept.log()
    want = [ask(kept, r) for r in requests]
    kept.stop()
    d = daemons(*flags, "--num-kv-blocks", str(blocks), "--max-num-batched-tokens", "48", model=MODELS / model)
    assert "sliding window" in d.log()
    assert ask_all(d, requests, n_kills=1) == want, d.log()
    check_pool(d, 1)


def test_memory_of_a_long_generation_stays_at_the_window(daemons):
    """7 blocks hold a window of 64 and two steps of 16 tokens; the answer alone would fill 125."""
    d = daemons("--device", "sim", "--sim-kv-layers", "sliding:64,sliding:64", "--num-kv-blocks", "8", "--max-num-batched-tokens", "16",
                "--sim-step-us", "0")
    assert "max_model_len=32768 kv_blocks=7" in d.log()  # not lowered
    tokens, _ = ask(d, {"prompt": list(range(300)), "max_tokens": 2000, **PARAMS})
    assert len(tokens) == 2000
    assert d.idle()["vllm:num_preemptions_total"] == 0


def test_what_never_fits_is_refused(daemons):
    d = daemons("--device", "sim", "--sim-kv-layers", "full,sliding:64", "--num-kv-blocks", "28", "--max-num-batched-tokens", "16",
                "--max-model-len", "4096")
    assert "max_model_len=4096 is more than the 320 tokens the KV cache holds" in d.log()  # 27 - 7 blocks of 16
    tokens, _ = ask(d, {"prompt": list(range(300)), "max_tokens": 21, **PARAMS})
    assert len(tokens) == 21
    status, _, answer = d.request("POST", "/v1/completions", {"prompt": list(range(300)), "max_tokens": 22})
    assert status == 400 and "holds 320 tokens" in answer["error"]["message"]


def test_groups_are_told(daemons):
    d = daemons("--device", "sim", "--sim-kv-layers", "full*2,sliding:64,sliding:64", "--max-model-len", "auto")
    assert re.findall(r'kv group=(\d) kind="([a-z ]+)" window=(\d+) block_size=(\d+) layers=(\d)', d.log()) == [
        ("0", "full", "0", "16", "1"), ("1", "sliding window", "64", "32", "1"), ("2", "sliding window", "64", "32", "1")]
    text = d.request("GET", "/metrics")[2]
    assert re.findall(r'^paged_kv_group_layers\{.*group="(\d)",kind="([a-z ]+)",window="(\d+)",block_size="(\d+)"\} (\d+)$', text, re.M) == [
        ("0", "full", "0", "16", "1"), ("1", "sliding window", "64", "32", "1"), ("2", "sliding window", "64", "32", "1")]
    m = d.metrics()
    assert 2 <= m["paged_kv_max_request_tokens"] == float(re.search(r"ready .* max_model_len=(\d+)", d.log())[1])
    assert m["paged_kv_full_length_requests"] >= 1
    inspected = subprocess.run([PAGED, "inspect", MODELS / "gemma3-tiny"], capture_output=True, text=True).stdout
    groups = re.findall(r"^KV group \d +(.*)$", inspected, re.M)
    assert groups[0] == "sliding window attention of 24 tokens, 1 layers" and groups.count(groups[0]) == 6
    assert groups[6:] == ["full attention, 1 layers"]


def test_layers_that_are_none(daemons):
    d = daemons("--device", "sim", "--sim-kv-layers", "full,sliding", wait=False)
    d.wait_log("expected full, sliding:WINDOW or chunked:WINDOW")
    d.stop(expect=d.process.wait(20))
    assert d.process.returncode != 0
