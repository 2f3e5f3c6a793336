"""Invariant I1: the tokens of a request depend on its prompt and sampling parameters alone.

Each mix sends a random batch of requests to a daemon with random scheduling options (batch and chunk size, cache on or off, a
pool so small that requests are preempted, a worker killed in mid-stream) and compares every token id and every logprob, bit for bit, with the same
request sent alone to a daemon of its own. PAGED_I1_MIXES sets the number of mixes per model.
"""
import concurrent.futures
import os
import random
import signal
import threading

import pytest
from conftest import IS_SANITIZED, SMOLLM2, TINY, Daemon

# Chunk sizes from 1 to 512, batches from 1 to 64, with and without cache, with pools that hold a fraction of the batch.
CONFIGS = [
    ("--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
    ("--max-num-batched-tokens", "64", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    ("--max-num-batched-tokens", "7", "--max-num-seqs", "5"),
    ("--max-num-batched-tokens", "1", "--max-num-seqs", "1", "--no-enable-prefix-caching"),
    ("--max-num-batched-tokens", "256", "--max-num-seqs", "32", "--num-kv-blocks", "48"),
    ("--max-num-batched-tokens", "33", "--max-num-seqs", "16", "--num-kv-blocks", "40", "--no-enable-prefix-caching"),
    ("--max-num-batched-tokens", "128", "--max-num-seqs", "64", "--long-prefill-token-threshold", "19", "--threads", "1"),
    ("--max-num-batched-tokens", "512", "--max-num-seqs", "24", "--block-size", "32", "--num-kv-blocks", "28"),
]
N_REQUESTS = 96  # distinct requests, drawn from by every mix


def make_requests(rng, vocab):
    """Prompts of 1 to 250 tokens, many with a common beginning, each with its own sampling."""
    stems = [[rng.randrange(vocab) for _ in range(200)] for _ in range(4)]
    requests = []
    for i in range(N_REQUESTS):
        stem = rng.choice(stems)[: rng.choice([0, 0, 16, 31, 32, 64, 150, 200])]
        prompt = stem + [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5, 15, 16, 17, 33, 50]))]
        params = {"max_tokens": rng.choice([1, 2, 8, 24, 60]), "ignore_eos": True, "logprobs": rng.choice([0, 0, 2])}
        if i % 2:
            params |= {"temperature": rng.choice([0.5, 1.0, 1.7]), "seed": rng.randrange(1 << 40),
                       "top_k": rng.choice([0, 0, 5, 50]), "top_p": rng.choice([1, 0.9, 0.5]), "min_p": rng.choice([0, 0.05]),
                       "repetition_penalty": rng.choice([1, 1.1]), "presence_penalty": rng.choice([0, 0.5]),
                       "frequency_penalty": rng.choice([0, 0.3])}
        else:
            params["temperature"] = 0
        requests.append({"prompt": prompt, "return_token_ids": True, **params})
    return requests


def answer_of(daemon, request):
    status, _, answer = daemon.request("POST", "/v1/completions", request, timeout=300)
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def run_mixes(tmp_path, model, n_mixes, max_batch):
    rng = random.Random(2026)
    reference = Daemon(tmp_path, "--max-model-len", "512", "--no-enable-prefix-caching", "--max-num-batched-tokens", "512", model=model)
    vocab = reference.request("GET", "/v1/models")[2]["data"][0]["meta"]["n_vocab"]
    requests = make_requests(rng, vocab)
    want = [answer_of(reference, r) for r in requests]
    reference.stop()
    n_preempted = n_restarts = 0
    for c, flags in enumerate(CONFIGS):
        d = Daemon(tmp_path, "--max-model-len", "512", *flags, model=model)
        for mix in range(c, n_mixes, len(CONFIGS)):
            chosen = [rng.randrange(N_REQUESTS) for _ in range(rng.choice([1, 2, 5, 16, 33, 64]))][:max_batch]
            killer = None
            if rng.random() < 0.25:
                killer = threading.Timer(rng.uniform(0.01, 0.2), lambda: os.kill(d.worker_pid(), signal.SIGKILL))
                killer.start()
            with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
                got = list(pool.map(lambda i: answer_of(d, requests[i]), chosen))
            if killer:
                killer.join()
                d.wait_ready_again()
            for i, answer in zip(chosen, got):
                assert answer == want[i], f"mix {mix} ({flags}): request {i} differs"
        m = d.idle()
        n_preempted += m["vllm:num_preemptions_total"]
        n_restarts += m["paged_worker_restarts_total"]
        d.stop()
    return n_preempted, n_restarts


def test_bundled_model(tmp_path):
    n = int(os.environ.get("PAGED_I1_MIXES", 16 if IS_SANITIZED else 200))
    n_preempted, n_restarts = run_mixes(tmp_path, TINY, n, 64)
    assert n_preempted > 0 and n_restarts > 0


@pytest.mark.skipif(IS_SANITIZED, reason="too slow under sanitizers")
@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not in the cache (scripts/fetch_model)")
def test_smollm2(tmp_path):
    n = int(os.environ.get("PAGED_I1_MIXES", 8))
    n_preempted, n_restarts = run_mixes(tmp_path, SMOLLM2, n, 64 if n >= 200 else 16)
    assert n < 200 or (n_preempted > 0 and n_restarts > 0)
