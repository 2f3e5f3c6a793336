"""Speculation with the simulated worker: the same tokens as without, whatever is rejected, preempted or killed."""
import concurrent.futures
import random

POOL = ("--device", "sim", "--sim-step-us", "500", "--num-kv-blocks", "30", "--max-model-len", "400", "--max-num-seqs", "16",
        "--max-num-batched-tokens", "64")


def requests(seed):
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(100)]
    for i in range(32):
        prompt = shared[: rng.randrange(100)] + [rng.randrange(256) for _ in range(1 + rng.randrange(60))]
        yield prompt, {"max_tokens": rng.randrange(1, 120), "temperature": i % 2, "seed": i, "return_token_ids": True,
                       "ignore_eos": i % 3 > 0, "logprobs": i % 4 or None}


def answers(daemon, seed, during=None):
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        jobs = [pool.submit(daemon.complete, prompt, **params) for prompt, params in requests(seed)]
        if during is not None:
            during()
        choices = [job.result()["choices"][0] for job in jobs]
    return [(c["token_ids"], c["finish_reason"], c["text"], c["logprobs"]) for c in choices]


def test_output_is_the_same_with_drafts(daemons):
    plain = daemons(*POOL)
    want = answers(plain, 7)
    assert not any("spec_decode" in name for name in plain.metrics())
    plain.stop()
    for k, accept, *more in ((1, 50), (4, 80, "--no-scheduler-reserve-full-isl"), (31, 97, "--scheduling-policy", "priority")):
        daemon = daemons(*POOL, "--sim-draft-tokens", k, "--sim-draft-accept", accept, *more)
        assert answers(daemon, 7) == want
        m = daemon.idle()
        assert m["vllm:num_preemptions_total"] > 0
        drafts, tokens, accepted, per_pos = (m[f"vllm:spec_decode_num_{x}_total"] for x in (
            "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"))
        assert 0 < accepted < tokens <= k * drafts and per_pos == accepted
        assert 'position="%d"' % (k - 1) in daemon.request("GET", "/metrics")[2]
        daemon.stop()


def test_output_is_the_same_after_a_kill(daemons):
    plain = daemons(*POOL)
    want = answers(plain, 8)
    plain.stop()
    daemon = daemons(*POOL, "--sim-draft-tokens", "5")
    assert answers(daemon, 8, during=daemon.kill_worker) == want
    daemon.idle()
