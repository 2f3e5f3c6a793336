"""Public bug reports of such servers, replayed: the whole kind of each fault must not happen here.

One test per report, named by its id. These ids are covered elsewhere:
  B061 B063 B064 B066   tests/unit/test_gguf.c          B067 B068   tests/unit/test_safetensors.c
  B097                  tests/unit/test_model_file.c    B024        tests/unit/test_tokenizer_golden.c (sentencepiece, special token + space)
  B018 B077             test_echo.py                    B074        test_access.py (with keys), here without
  B069 B071             test_metrics.py, here in short  B081        test_http.py (dropped at its limit), here with twenty
These cannot apply before the feature is there: B026 and B027 (chat messages; a completion prompt parses special tokens, as with the peers),
B040 (a model with a sliding window is served up to its window, so that no prompt is longer).
"""
import concurrent.futures
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import IS_SANITIZED, PAGED, SLOW, TINY
from test_processes import alive, wait_gone


def refused(daemon, body, param):
    status, _, answer = daemon.request("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == param, answer
    return answer["error"]["message"]


def wait_for(condition, timeout=10):
    end = time.monotonic() + timeout * SLOW
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def post(sock, body, headers=b""):
    data = json.dumps(body).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%b" % (headers, len(data), data))


def texts_by_index(events):
    out = {}
    for e in events:
        for c in e["choices"]:
            out[c["index"]] = out.get(c["index"], "") + c["text"]
    return out


# --- a: HTTP and API ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_b001_stop_string_over_several_tokens_never_leaks(tiny, keep):
    params = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    full = tiny.text("And it came to pass", **params)
    for at in range(3, 30, 4):
        stop = full[at:at + 7]
        first = full.index(stop)
        want = full[:first + (len(stop) if keep else 0)]
        events = list(tiny.stream("And it came to pass", stop=stop, include_stop_str_in_output=keep, **params))
        assert texts_by_index(events)[0] == want == tiny.text("And it came to pass", stop=stop, include_stop_str_in_output=keep, **params)


def test_b003_empty_prompts_end_only_themselves(tiny):
    for prompt in ("", [""], [], [[]], ["a", ""]):
        refused(tiny, {"prompt": prompt}, "prompt")
    assert tiny.complete("a", max_tokens=2)["usage"]["completion_tokens"] >= 1


def test_b004_token_ids_outside_the_vocabulary(tiny):
    vocab = tiny.request("GET", "/v1/models")[2]["data"][0]["meta"]["n_vocab"]
    for bad in (-1, vocab, 4294967295, 4294967296 + 5, 2 ** 63):
        message = refused(tiny, {"prompt": [5, bad, 6]}, "prompt")
        assert str(bad)[:8] in message
    tiny.complete([vocab - 1], max_tokens=1)


def test_b006_logit_bias_keys(tiny):
    vocab = tiny.request("GET", "/v1/models")[2]["data"][0]["meta"]["n_vocab"]
    for key in (str(vocab), str(vocab * 1000), "-1", "abc", "", "1.5", "0x10", " 3", "99999999999999999999999"):
        refused(tiny, {"prompt": "a", "logit_bias": {key: 1}}, "logit_bias")
    tiny.complete("a", max_tokens=1, logit_bias={str(vocab - 1): 1})


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_b007_numbers_that_are_not_finite(tiny, field):
    for word in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "inf"):
        status, _, answer = tiny.request("POST", "/v1/completions", f'{{"prompt":"a","max_tokens":1,"{field}":{word}}}'.encode())
        assert status == 400, (word, answer)


FIELDS = ["model", "prompt", "suffix", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "echo", "stop",
          "stop_token_ids", "include_stop_str_in_output", "logit_bias", "logprobs", "stream", "stream_options", "ignore_eos", "min_tokens",
          "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "priority", "return_token_ids", "return_cached_tokens_details",
          "skip_special_tokens", "response_format", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
          "structured_outputs", "truncate_prompt_tokens", "user", "add_special_tokens", "spaces_between_special_tokens"]


@pytest.mark.parametrize("field", FIELDS)
def test_b008_every_field_with_every_type(tiny, field):
    for value in ("text", 7, -7.5, 1e300, True, False, [], [1], ["a"], [[1]], {}, {"a": 1}, {"a": {"b": []}}, [None], None):
        status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, field: value})
        if status == 400:
            assert answer["error"]["param"] in (field, "prompt", "max_tokens", "n", "stream_options"), answer
            assert field in answer["error"]["message"] or answer["error"]["param"] != field, answer
        else:
            assert status in (200, 404), answer
    assert tiny.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("depth", [10000, 200000])
@pytest.mark.parametrize("name", ["x", "stop", "prompt", "logit_bias", "tools"])
def test_b009_deep_nesting(tiny, name, depth):
    other = "" if name == "prompt" else '"prompt":"a",'
    for left, right in (("[", "]"), ('{"a":', "}")):
        body = "{" + other + f'"{name}":' + left * depth + ("1" if left != "[" else "") + right * depth + "}"
        status, _, answer = tiny.request("POST", "/v1/completions", body.encode())
        assert status == 400 and "nested" in answer["error"]["message"]
    flat = {"prompt": "a", "max_tokens": 1, "x": [0] * depth}
    assert tiny.request("POST", "/v1/completions", flat)[0] == 200


def test_b010_chunked_bodies(tiny):
    body = json.dumps({"prompt": "In the", "max_tokens": 6, "temperature": 0}).encode()
    want = tiny.text("In the", max_tokens=6, temperature=0)
    with socket.create_connection(("127.0.0.1", tiny.port)) as s:
        s.settimeout(30 * SLOW)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\nTrailer: X-Sum\r\n\r\n")
        for i in range(len(body)):
            s.sendall(b"1;name=value\r\n" + body[i:i + 1] + b"\r\n")
        s.sendall(b"0\r\nX-Sum: 1\r\n\r\n")
        answer = b""
        while part := s.recv(65536):
            answer += part
    head, data = answer.split(b"\r\n\r\n", 1)
    assert b" 200 " in head.split(b"\r\n")[0] and json.loads(data)["choices"][0]["text"] == want


def test_b010_body_limit_holds_without_a_length(daemons):
    d = daemons("--max-body-bytes", "4K", "--device", "sim")
    with socket.create_connection(("127.0.0.1", d.port)) as s:
        s.settimeout(30 * SLOW)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n10\r\n")
        s.sendall(b" " * 16 + b"\r\n")
        assert b" 413 " in s.recv(65536).split(b"\r\n")[0]


def test_b012_disconnect_ends_the_work(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "2000", "--sim-token-us", "20", "--max-model-len", "20000", "--num-kv-blocks", "2000",
                "--max-num-batched-tokens", "64")
    for stream in (True, False):
        for prompt in ([7] * 4, [9] * 10000):  # decoding, in mid-prefill
            with socket.create_connection(("127.0.0.1", d.port)) as s:
                post(s, {"prompt": prompt, "max_tokens": 5000, "ignore_eos": True, "stream": stream})
                time.sleep(0.1)
            d.idle(timeout=2)
    m = d.metrics()
    assert m["vllm:generation_tokens_total"] < 2000
    aborted = [v for k, v in m.items() if k.startswith("vllm:request_success_total") and '"abort"' in k]
    assert aborted == [4]


def test_b014_each_choice_finishes_once_with_its_own_index(tiny):
    events = list(tiny.stream(["And it", "The king"], n=3, max_tokens=30, temperature=1.2, seed=8, stop=["e"]))
    finals = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(i for i, _ in finals) == list(range(6)) and all(r in ("stop", "length") for _, r in finals)
    last = {i: n for n, e in enumerate(events) for i in [c["index"] for c in e["choices"]]}
    ends = {c["index"]: n for n, e in enumerate(events) for c in e["choices"] if c["finish_reason"]}
    assert last == ends  # nothing of a choice behind its end


def test_b016_seeds_do_not_depend_on_neighbours(tiny):
    params = {"max_tokens": 24, "temperature": 0.8, "seed": 42}
    want = tiny.text("The king", **params)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            others = [pool.submit(tiny.text, "The queen", max_tokens=24, temperature=0.8) for _ in range(3)]
            assert pool.submit(tiny.text, "The king", **params).result() == want
            for o in others:
                o.result()


def test_b017_usage_comes_once(tiny):
    events = list(tiny.stream("a", max_tokens=5, stream_options={"include_usage": True}))
    assert all(e["usage"] is None for e in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] <= 5
    for options in ({"stream_options": {"include_usage": False}}, {}):
        assert not any("usage" in e for e in tiny.stream("a", max_tokens=5, **options))


def test_b020_max_tokens_at_its_ends(tiny):
    for value in ("2147483647", "9e18", "1e18", "0", "-1", "9223372036854775807", "18446744073709551616", "4294967297"):
        status, _, answer = tiny.request("POST", "/v1/completions", f'{{"prompt":"abc","max_tokens":{value}}}'.encode())
        assert status == 400 and answer["error"]["param"] == "max_tokens", (value, answer)
    tiny.complete("abc", max_tokens=1)


def test_b021_nul_is_a_character(tiny):
    n = {p: tiny.complete(p, max_tokens=1)["usage"]["prompt_tokens"] for p in ("ab", "ab\0", "ab\0cd and more text", "\0")}
    assert n["ab"] < n["ab\0"] < n["ab\0cd and more text"] and n["\0"] >= 1
    assert tiny.text("ab\0one", max_tokens=12, temperature=0) != tiny.text("ab\0two", max_tokens=12, temperature=0) or n["ab"] > 1


def test_b074_preflight_and_head(tiny):
    with socket.create_connection(("127.0.0.1", tiny.port)) as s:
        s.settimeout(30 * SLOW)
        s.sendall(b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n"
                  b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\nHEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
                  b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        while part := s.recv(65536):
            data += part
    heads = data.split(b"HTTP/1.1 ")[1:]
    assert [h[:3] for h in heads] == [b"204", b"200", b"200", b"200"]
    assert all(h.endswith(b"\r\n\r\n") for h in heads[:3]) and json.loads(heads[3].split(b"\r\n\r\n")[1])["version"]


def test_b075_a_queued_request_whose_client_left_computes_nothing(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "20000", "--max-num-seqs", "1")
    with socket.create_connection(("127.0.0.1", d.port)) as running:
        post(running, {"prompt": [1, 2], "max_tokens": 2000, "ignore_eos": True, "stream": True})
        running.recv(4096)
        with socket.create_connection(("127.0.0.1", d.port)) as queued:
            post(queued, {"prompt": [3] * 100, "max_tokens": 100, "ignore_eos": True})
            wait_for(lambda: d.metrics()["vllm:num_requests_waiting"] == 1)
        wait_for(lambda: d.metrics()["vllm:num_requests_waiting"] == 0)
        assert d.metrics()["vllm:num_requests_running"] == 1
    m = d.idle()
    assert m["vllm:prompt_tokens_total"] == 2, "its prompt was computed"


def test_b078_a_bad_stream_request_is_refused_before_it_begins(tiny):
    with socket.create_connection(("127.0.0.1", tiny.port)) as s:
        s.settimeout(10 * SLOW)
        post(s, {"prompt": "a", "stream": True, "n": 0}, b"Connection: close\r\n")
        data = b""
        while part := s.recv(65536):
            data += part
    assert b" 400 " in data.split(b"\r\n")[0] and b"event-stream" not in data
    assert json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]["param"] == "n"


def test_b079_a_prompt_over_the_context_is_refused_with_both_numbers(tiny):
    message = refused(tiny, {"prompt": "remember the word apple. " + "word " * 2000, "max_tokens": 5}, "prompt")
    assert "512" in message
    assert sum(int(w) > 512 for w in message.replace(",", " ").split() if w.isdigit()) >= 1, message


def test_b081_stalled_streams_hurt_nobody(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000", "--max-model-len", "100000", "--max-output-buffer-bytes", "64K",
                "--num-kv-blocks", "200000")
    normal = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True, "seed": 1}
    want = d.complete(**normal)["choices"][0]["text"]
    stalled = []
    for i in range(20):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", d.port))
        post(s, {"prompt": [i], "max_tokens": 90000, "ignore_eos": True, "stream": True, "logprobs": 20})
        stalled.append(s)
    wait_for(lambda: d.metrics()["vllm:num_requests_running"] == 20)
    end = time.monotonic() + 60 * SLOW
    while d.metrics()["vllm:num_requests_running"] > 0:  # each is dropped at its limit
        assert d.complete(**normal)["choices"][0]["text"] == want
        assert time.monotonic() < end, "stalled clients are kept"
    assert d.log().count("client reads too slowly") == 20
    for s in stalled:
        s.close()


# --- b: tokenizer ---------------------------------------------------------------------------------------------------------------------

RUNS = {"letters": "a", "dots": ".", "spaces": " ", "newlines": "\n", "cjk": "漢", "digits": "7", "combining": "e\u0301", "emoji": "👨‍👩‍👧"}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    from conftest import Daemon
    d = Daemon(tmp_path_factory.mktemp("roomy"), "--device", "sim", "--sim-step-us", "1000", "--max-model-len", "3000000",
               "--max-num-batched-tokens", "65536", "--num-kv-blocks", "200000", "--max-num-seqs", "16", "--max-body-bytes", "64M", model=TINY)
    yield d
    d.stop()


@pytest.mark.parametrize("kind", RUNS)
def test_b022_one_unbroken_run(roomy, kind):
    for n_bytes in (30000, 500000):
        n = max(n_bytes // len(RUNS[kind].encode()), 1) if kind == "emoji" else n_bytes
        start = time.monotonic()
        answer = roomy.complete(RUNS[kind] * n, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] > 0
        assert time.monotonic() - start < 30 * SLOW


def test_b023_a_long_word_is_not_quadratic_and_stalls_nobody(roomy):
    def timed(prompt):
        start = time.monotonic()
        roomy.complete(prompt, max_tokens=1)
        return time.monotonic() - start

    gaps = []

    def stream():
        last = time.monotonic()
        for _ in roomy.stream([1, 2, 3], max_tokens=1500, ignore_eos=True):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    t = threading.Thread(target=stream)
    t.start()
    spaced, whole = timed("a " * 100000), timed("a" * 100000)
    longer = timed("a" * 400000)
    t.join(120 * SLOW)
    assert whole < 10 * spaced + 1 * SLOW and longer < 12 * whole + 1 * SLOW
    assert len(gaps) > 100 and max(gaps) < 2 * SLOW, f"a stream stood still for {max(gaps):.2f} s"


def test_b028_characters_split_over_tokens(tiny):
    text = "👨‍👩‍👧‍👦 é ภาษาไทย 漢字 🏳️‍🌈"
    for i, params in enumerate([{"temperature": 2, "seed": s, "max_tokens": 80} for s in range(6)]):
        events = list(tiny.stream(text, **params))  # every event was parsed as JSON from valid UTF-8
        whole = tiny.text(text, **params)
        assert texts_by_index(events)[0] == whole
        assert whole.count("\ufffd") == "".join(texts_by_index(events)[0]).count("\ufffd")


# --- d: KV cache and scheduler ---------------------------------------------------------------------------------------------------------


def test_b037_a_request_larger_than_the_pool_blocks_nobody(daemons):
    d = daemons("--max-model-len", "512", "--num-kv-blocks", "10")
    message = refused(d, {"prompt": [5] * 300, "max_tokens": 5}, "prompt")
    assert "300" in message and "144" in message
    assert all(d.complete([i, i], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3 for i in range(5))


@pytest.mark.parametrize("n", [15, 16, 17, 63, 64, 65])
def test_b039_prompts_around_a_block(tiny, n):
    prompt = [300 + (i * 7 + n) % 100 for i in range(n)]
    answers = [tiny.complete(prompt, max_tokens=1, temperature=0, logprobs=2, return_token_ids=True) for _ in range(3)]
    assert len({json.dumps(a["choices"]) for a in answers}) == 1
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == (n - 1) // 16 * 16


def test_b042_hashes_are_not_linear(tiny):
    base = [310 + i for i in range(48)]
    tiny.complete(base, max_tokens=1)
    assert tiny.complete(base, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    for at, (up, down) in enumerate([(31, -1), (1, -31), (1, -1), (33, -1), (65, -2), (-1, 31), (2, -2), (-31, 1)]):
        other = list(base)
        other[at] += up
        other[at + 1] += down
        assert tiny.complete(other, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tiny.complete(base[16:32] + base[:16] + base[32:], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_b043_aborted_streams_leave_nothing(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000")
    d.complete([1], max_tokens=1)
    free = d.idle()["paged_kv_blocks_used"]
    for _ in range(3):
        def abort(i):
            with socket.create_connection(("127.0.0.1", d.port)) as s:
                post(s, {"prompt": [i, i + 1, i + 2], "max_tokens": 1000, "ignore_eos": True, "stream": True})
                for _ in range(i % 4):
                    s.recv(2048)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(abort, range(100)))
        assert d.idle()["paged_kv_blocks_used"] == free
    assert d.complete([9], max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20


def test_b045_a_long_prefill_lets_others_pass(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000", "--sim-token-us", "30", "--max-model-len", "40000", "--num-kv-blocks", "4000",
                "--max-num-batched-tokens", "256")
    gaps, done = [], {}

    def stream():
        last = time.monotonic()
        for _ in d.stream([1, 2], max_tokens=400, ignore_eos=True):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    def long_prompt():
        d.complete([5] * 30000, max_tokens=1)
        done["long"] = time.monotonic()

    threads = [threading.Thread(target=stream), threading.Thread(target=long_prompt)]
    threads[0].start()
    time.sleep(0.1)
    threads[1].start()
    time.sleep(0.2)
    # fcfs gives the long prompt what a step has left; the running stream keeps its token in every step
    for t in threads:
        t.join(60 * SLOW)
    assert max(gaps) < 0.5 * SLOW, max(gaps)
    d.idle()


def test_b045_a_short_prompt_is_answered_during_a_long_prefill(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000", "--sim-token-us", "30", "--max-model-len", "40000", "--num-kv-blocks", "4000",
                "--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "128")
    done = {}

    def long_prompt():
        d.complete([5] * 30000, max_tokens=1)
        done["long"] = time.monotonic()

    t = threading.Thread(target=long_prompt)
    t.start()
    time.sleep(0.2)
    d.complete([6] * 100, max_tokens=5, ignore_eos=True)
    done["short"] = time.monotonic()
    t.join(60 * SLOW)
    assert done["short"] < done["long"]


def test_b046_chunk_edges_do_not_change_the_text(daemons, tiny):
    prompts = [[300 + (i * 11) % 150 for i in range(n)] for n in (63, 64, 65, 73, 127, 128, 129)]
    for p in prompts:
        if len(p) > 64:
            p[63] = 2  # a control token right at the edge
    want = [tiny.text(p, max_tokens=8, temperature=0, ignore_eos=True) for p in prompts]
    d = daemons("--max-model-len", "512", "--max-num-batched-tokens", "64", "--no-enable-prefix-caching")
    assert [d.text(p, max_tokens=8, temperature=0, ignore_eos=True) for p in prompts] == want


def test_b087_preempted_requests_resume_with_their_output(daemons, tiny):
    prompts = [[320 + i, 321 + i, 322] for i in range(10)]
    params = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    want = [tiny.text(p, **params) for p in prompts]
    d = daemons("--max-model-len", "512", "--num-kv-blocks", "32")
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        got = list(pool.map(lambda p: texts_by_index(d.stream(p, timeout=120, **params))[0], prompts))
    assert got == want
    assert d.idle()["vllm:num_preemptions_total"] > 0


# --- g: workers -----------------------------------------------------------------------------------------------------------------------


def test_b056_health_sees_a_dead_worker(daemons):
    d = daemons("--max-model-len", "512")
    os.kill(d.worker_pid(), signal.SIGSTOP)  # so that the next one is not up before we look
    os.kill(d.worker_pid(), signal.SIGKILL)
    seen = set()
    end = time.monotonic() + 10 * SLOW
    while time.monotonic() < end:
        status, _, answer = d.request("GET", "/health")
        seen.add(status)
        if status == 200 and d.metrics()["paged_worker_restarts_total"] == 1:
            break
    assert d.metrics()["paged_worker_restarts_total"] == 1 and seen <= {200, 503}
    assert d.text("a", max_tokens=2)


def test_b058_sigkilled_engine_leaves_nothing(daemons):
    for under_load in (False, True):
        d = daemons("--device", "sim", "--sim-step-us", "5000")
        worker = d.worker_pid()
        if under_load:
            s = socket.create_connection(("127.0.0.1", d.port))
            post(s, {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True})
            s.recv(1000)
        d.process.kill()
        d.process.wait()
        wait_gone(worker)
        d.log_file.close()
        again = daemons("--device", "sim", "--port", str(d.port))
        assert again.port == d.port and again.complete("a", max_tokens=1)
        again.stop()


def test_b059_bind_comes_first(daemons, tiny):
    for flags in (("--port", str(tiny.port)), ("--host", "203.0.113.9", "--port", "0"), ("--host", "not-an-address", "--port", "0")):
        start = time.monotonic()
        p = subprocess.run([PAGED, "serve", "--model", TINY, *flags], capture_output=True, text=True, timeout=30 * SLOW)
        assert p.returncode not in (0, -6, -11) and time.monotonic() - start < 1 * SLOW
        assert "worker" not in p.stderr and len(p.stderr.splitlines()) <= 3, p.stderr


@pytest.mark.skipif(IS_SANITIZED, reason="sanitizers reserve terabytes of address space")
def test_b060_no_memory_is_a_clear_end():
    def small():
        resource.setrlimit(resource.RLIMIT_AS, (1500 << 20, 1500 << 20))

    p = subprocess.run([PAGED, "serve", "--model", TINY, "--port", "0", "--kv-cache-memory", "2G", "--device", "cpu"], capture_output=True,
                       text=True, timeout=60, preexec_fn=small)
    assert p.returncode in (64, 70, 71), p.stderr
    assert "memory" in p.stderr or "num_kv_blocks" in p.stderr, p.stderr


def test_b092_an_error_in_the_worker_ends_that_request_alone(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000", env={"PAGED_SIM_FAULTS": "nan:77"})
    want = d.text([5], max_tokens=40, ignore_eos=True, seed=1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good = pool.submit(d.text, [5], max_tokens=40, ignore_eos=True, seed=1)
        status, _, answer = d.request("POST", "/v1/completions", {"prompt": [77], "max_tokens": 40})
        assert status == 500 and answer["error"]["message"]
        assert good.result() == want
    assert d.text([5], max_tokens=40, ignore_eos=True, seed=1) == want and d.metrics()["paged_worker_restarts_total"] == 0


# --- i: metrics and health ------------------------------------------------------------------------------------------------------------


def test_b069_counters_never_fall(daemons):
    d = daemons("--max-model-len", "512", "--num-kv-blocks", "24")
    stop = threading.Event()

    def load(i):
        while not stop.is_set():
            d.complete([400 + i % 3] * 40 + [i], max_tokens=60, temperature=0.5, ignore_eos=True)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    before = d.metrics()
    for _ in range(12):
        time.sleep(0.15)
        now = d.metrics()
        fell = {k for k in before if ("_total" in k or "_count" in k or "_bucket" in k or "_sum" in k) and now[k] < before[k]}
        assert not fell, fell
        before = now
    stop.set()
    for t in threads:
        t.join()
    m = d.idle()
    assert m["vllm:num_preemptions_total"] > 0 and m["vllm:prefix_cache_hits_total"] > 0


def test_b071_blocks_in_use_cached_and_free(daemons):
    d = daemons("--max-model-len", "512")
    for i in range(24):
        d.complete([300 + i] * 40, max_tokens=2)
    m = d.idle()
    assert m["paged_kv_blocks_used"] == 0 and m["paged_kv_blocks_cached"] >= 24 and m["vllm:kv_cache_usage_perc"] == 0
    assert m["paged_kv_blocks_used"] + m["paged_kv_blocks_cached"] + m["paged_kv_blocks_free"] == m["paged_kv_blocks"]


def test_b099_health_is_not_ready_before_it_is(daemons, tmp_path):
    shutil.copy(TINY, tmp_path / "model.gguf")
    d = daemons("--max-model-len", "512", model=tmp_path / "model.gguf")
    worker = d.worker_pid()
    shutil.move(tmp_path / "model.gguf", tmp_path / "away")
    os.kill(worker, signal.SIGKILL)
    wait_gone(worker)
    end = time.monotonic() + 5 * SLOW
    while True:
        status, headers, answer = d.request("GET", "/health")
        if status == 503:
            break
        assert time.monotonic() < end, "healthy without a worker"
    assert answer["status"] == "recovering" and answer["reason"] and headers["Retry-After"]
    shutil.move(tmp_path / "away", tmp_path / "model.gguf")
    d.wait_ready_again()
    assert d.text("a", max_tokens=2) and not alive(worker)
