"""An encoder-decoder model (a small BART) through the whole program: text equal to that of transformers' greedy generate, alone and together,
through preemptions and worker kills; its blocks come back."""
import json
import os
import re
import signal
import subprocess
import threading

import pytest
from conftest import PAGED, ROOT, SLOW, wait_until

BART = ROOT / "tests" / "data" / "models" / "bart-tiny"
CASES = json.loads((ROOT / "tests" / "golden" / "encdec" / "bart-tiny.json").read_text())
MAX_SOURCE = 320


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    from conftest import Daemon

    daemon = Daemon(tmp_path_factory.mktemp("bart"), model=BART)
    yield daemon
    daemon.idle()
    daemon.stop()


def check(answer, case):
    choice = answer["choices"][0]
    assert choice["text"] == case["text"]
    assert choice["finish_reason"] == "stop"  # its last token is the end, by itself or forced at the limit
    assert answer["usage"]["prompt_tokens"] == len(case["encoder_ids"])
    assert answer["usage"]["completion_tokens"] == len(case["ids"])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c['encoder_ids'])}-{c['max_tokens']}")
def test_greedy_text(case, bart):
    params = {"temperature": 0, "max_tokens": case["max_tokens"]}
    check(bart.complete(case["prompt"], **params), case)
    answer = bart.complete(case["encoder_ids"], return_token_ids=True, **params)
    check(answer, case)
    assert answer["choices"][0]["token_ids"] == case["ids"]
    assert answer["choices"][0]["prompt_token_ids"] == case["encoder_ids"]
    pieces = [c["text"] for e in bart.stream(case["prompt"], **params) for c in e["choices"]]
    assert "".join(pieces) == case["text"]
    bart.idle()


def together(daemon, n_each=3, meanwhile=lambda: None):
    """Every case several times at once: all are there before the worker goes on."""
    answers = []
    worker = daemon.worker_pid()

    def one(case):
        answers.append((case, daemon.complete(case["prompt"], temperature=0, max_tokens=case["max_tokens"])))

    threads = [threading.Thread(target=one, args=(case,)) for case in CASES * n_each]
    os.kill(worker, signal.SIGSTOP)
    try:
        for t in threads:
            t.start()
        daemon.wait_held(len(threads))
    finally:
        os.kill(worker, signal.SIGCONT)
    meanwhile()
    for t in threads:
        t.join(60 * SLOW)
    assert len(answers) == n_each * len(CASES)
    for case, answer in answers:
        check(answer, case)


def test_together(bart):
    before = bart.idle()["vllm:prompt_tokens_total"]
    together(bart)
    n_prompt = sum(len(c["encoder_ids"]) + 1 for c in CASES) * 3  # the decoder's first token is one, too
    assert bart.idle()["vllm:prompt_tokens_total"] == before + n_prompt


def test_preempted_and_killed(daemons):
    """A pool of little more than one request of full length, small steps; then a worker dies."""
    d = daemons("--num-kv-blocks", "48", "--max-num-seqs", "8", "--max-num-batched-tokens", "16",
                "--no-scheduler-reserve-full-isl", "--kv-cache-dtype", "f32", model=BART)
    together(d)
    assert d.idle()["vllm:num_preemptions_total"] > 0
    together(d, meanwhile=d.kill_worker)
    d.wait_ready_again()
    together(d, 1)
    d.idle()


def test_refusals(bart):
    def refused(prompt, **params):
        status, _, answer = bart.request("POST", "/v1/completions", {"prompt": prompt, **params})
        assert status == 400, answer
        return answer["error"]

    error = refused([5] * (MAX_SOURCE + 1), max_tokens=4)
    assert error["param"] == "prompt" and "320 tokens" in error["message"] and "321 tokens" in error["message"]
    error = refused("a b c " * 1000, max_tokens=4)
    assert error["param"] == "prompt" and "320 tokens" in error["message"]
    error = refused("a", max_tokens=MAX_SOURCE)
    assert error["param"] == "max_tokens" and "319" in error["message"] and "320" in error["message"]
    assert refused("a", echo=True)["param"] == "echo"
    assert refused("a", echo=True, max_tokens=0, logprobs=1)["param"] == "echo"
    assert refused([])["param"] == "prompt"
    assert bart.complete([5] * MAX_SOURCE, max_tokens=MAX_SOURCE - 1, ignore_eos=True)["usage"]["total_tokens"] == 2 * MAX_SOURCE - 1
    bart.idle()


def test_options(bart):
    case = CASES[3]
    plain = {"temperature": 0, "max_tokens": case["max_tokens"]}
    answer = bart.complete(case["prompt"], logprobs=2, **plain)
    assert answer["choices"][0]["text"] == case["text"]
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(case["ids"])
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"])
    stop = case["text"][20:24]
    cut = bart.complete(case["prompt"], stop=stop, **plain)["choices"][0]
    assert cut["text"] == case["text"][: case["text"].index(stop)] and cut["finish_reason"] == "stop"
    seeded = {"temperature": 1.0, "max_tokens": 30, "seed": 7, "ignore_eos": True}
    assert bart.text(case["prompt"], **seeded) == bart.text(case["prompt"], **seeded)
    answer = bart.complete(case["prompt"], n=3, **seeded)
    assert len({c["text"] for c in answer["choices"]}) == 3 and answer["usage"]["prompt_tokens"] == len(case["encoder_ids"])
    texts = [c["text"] for c in bart.complete([c["prompt"] for c in CASES[:3]], temperature=0, max_tokens=2)["choices"]]
    assert len(texts) == 3
    assert bart.complete(case["prompt"], temperature=0)["usage"]["completion_tokens"] == 16
    bart.idle()


def test_abandoned_streams_give_their_blocks_back(bart):
    for _ in range(4):
        stream = bart.stream(CASES[5]["prompt"], max_tokens=300, ignore_eos=True)
        next(stream)
        stream.close()
    bart.idle()


def test_log_says_what_is_left_out(bart):
    log = bart.log()
    assert len(re.findall(r"prefix caching is off", log)) == 1
    assert re.search(r"left out here: num_beams, no_repeat_ngram_size$", log, re.M)
    assert re.search(r'kv group=1 kind="cross".*layers=3', log)
    wait_until(lambda: bart.metrics()["paged_kv_blocks_used"] == 0)


def test_run_and_inspect(tmp_path):
    def paged(*args):
        return subprocess.run([str(a) for a in (PAGED, *args)], capture_output=True, stdin=subprocess.DEVNULL, timeout=60 * SLOW)

    case = CASES[4]
    run = ("run", "--model", BART, "--runtime-dir", tmp_path / "run", "--temperature", "0")
    result = paged(*run, "-n", case["max_tokens"], "-p", case["prompt"])
    assert result.returncode == 0 and result.stdout.decode(errors="replace") == case["text"]
    result = paged(*run, "-p", "a b c " * 500)
    assert result.returncode == 64 and b"expected 1 to 320 (the model's encoder)" in result.stderr
    result = paged(*run, "--max-model-len", 321, "-p", "a")
    assert result.returncode == 64 and b"max_model_len: expected at most 320" in result.stderr, result
    text = paged("inspect", BART).stdout.decode()
    assert re.search(r"^encoder +2 layers, 3 heads of 16 values, feed-forward 80, input of at most 320 tokens$", text, re.M), text
    assert "this build can run it: yes" in text
