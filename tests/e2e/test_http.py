"""The HTTP surface against real sockets: shapes, errors, framing, abuse."""
import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import IS_SANITIZED, PAGED, SLOW, TINY, wait_until


def raw(daemon, data, timeout=20):
    """Sends bytes, returns everything until the server closes."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=timeout) as s:
        s.sendall(data)
        out = bytearray()
        while chunk := s.recv(65536):
            out += chunk
        return bytes(out)


def error_of(answer):
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


def test_completion_shape(tiny):
    answer = tiny.complete("And God said,", max_tokens=8, temperature=0)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert choice["index"] == 0 and choice["finish_reason"] in ("length", "stop") and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] <= 8 and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_stream_equals_whole(tiny):
    params = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    whole = tiny.text("In the beginning", **params)
    events = list(tiny.stream("In the beginning", stream_options={"include_usage": True}, **params))
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == whole
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 40
    finishes = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
    assert finishes[-1] == "length" and set(finishes[:-1]) <= {None}
    assert len({e["id"] for e in events}) == 1


def test_no_usage_unless_asked(tiny):
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in e for e in tiny.stream("a", max_tokens=4, **options))


def test_token_id_prompts_and_choices(tiny):
    ids = tiny.complete("The sea", max_tokens=1, temperature=0, return_token_ids=True)
    assert len(ids["choices"][0]["token_ids"]) == 1
    answer = tiny.complete([[100, 101], [102]], max_tokens=3, temperature=1, n=2, seed=1)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] <= 12
    first = list(tiny.stream(["a", "b"], n=2, max_tokens=6, seed=3))
    finals = [c["index"] for e in first for c in e["choices"] if c["finish_reason"]]
    assert sorted(finals) == [0, 1, 2, 3]


def test_stop_string_is_held_back(tiny):
    full = tiny.text("And the LORD said", max_tokens=40, temperature=0)
    stop = full[7:13]
    at = full.index(stop)
    answer = tiny.complete("And the LORD said", max_tokens=40, temperature=0, stop=[stop])["choices"][0]
    assert answer["text"] == full[:at] and answer["finish_reason"] == "stop" and answer["stop_reason"] == stop
    streamed = list(tiny.stream("And the LORD said", max_tokens=40, temperature=0, stop=stop))
    assert "".join(e["choices"][0]["text"] for e in streamed) == full[:at]
    kept = tiny.text("And the LORD said", max_tokens=40, temperature=0, stop=stop, include_stop_str_in_output=True)
    assert kept == full[: at + len(stop)]


def test_logprobs(tiny):
    choice = tiny.complete("And God", max_tokens=5, temperature=0, logprobs=3)["choices"][0]
    lp = choice["logprobs"]
    assert len(lp["tokens"]) == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == len(lp["text_offset"]) == 5
    assert "".join(lp["tokens"]) == choice["text"]
    for token, value, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]):
        assert len(top) == 3 and top[token] == value == max(top.values()) and value <= 0
    assert lp["text_offset"][0] == 0 and lp["text_offset"] == sorted(lp["text_offset"])
    zero = tiny.complete("And God", max_tokens=2, temperature=0, logprobs=0)["choices"][0]["logprobs"]
    assert [list(t) for t in zero["top_logprobs"]] == [[t] for t in zero["tokens"]]


def test_seed_and_sampling(tiny):
    a = tiny.text("The king", max_tokens=20, temperature=1, seed=42)
    assert a == tiny.text("The king", max_tokens=20, temperature=1, seed=42)
    others = {tiny.text("The king", max_tokens=20, temperature=1, seed=s) for s in range(8)}
    assert len(others) > 4
    assert tiny.text("The king", max_tokens=20, temperature=1, top_k=1) == tiny.text("The king", max_tokens=20, temperature=0)


def test_logit_bias_forces_and_bans(tiny):
    ids = tiny.complete("The", max_tokens=3, temperature=0, logit_bias={"300": 100}, return_token_ids=True)
    assert ids["choices"][0]["token_ids"] == [300, 300, 300]
    normal = tiny.complete("The", max_tokens=1, temperature=0, return_token_ids=True)["choices"][0]["token_ids"][0]
    banned = tiny.complete("The", max_tokens=1, temperature=0, logit_bias={str(normal): -100}, return_token_ids=True)
    assert banned["choices"][0]["token_ids"][0] != normal


def test_stop_token_ids_and_min_tokens(tiny):
    ids = tiny.complete("The king", max_tokens=6, temperature=0, return_token_ids=True)["choices"][0]["token_ids"]
    answer = tiny.complete("The king", max_tokens=6, temperature=0, stop_token_ids=[ids[2]], return_token_ids=True)["choices"][0]
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == ids[2] and len(answer["token_ids"]) <= 3
    longer = tiny.complete("The king", max_tokens=6, temperature=0, stop_token_ids=[ids[2]], min_tokens=5,
                           return_token_ids=True)["choices"][0]
    assert len(longer["token_ids"]) >= 5 and ids[2] not in longer["token_ids"][:4]


def test_cached_tokens_are_told(tiny):
    prompt = list(range(300, 364))
    assert tiny.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tiny.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    details = tiny.complete(prompt, max_tokens=1, return_cached_tokens_details=True)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 48, "cached_tokens_details": {"device": 48, "host": 0, "storage": 0}}
    chunks = list(tiny.stream(prompt, max_tokens=1, return_cached_tokens_details=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["prompt_tokens_details"] == details
    salted = tiny.complete(prompt, max_tokens=1, cache_salt="tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("body,param", [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1 << 20]}, "prompt"),
    ({"prompt": [4294967295]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "8"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2147483647}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 9e18}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "top_k": 1.5}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": "5"}, "logprobs"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop_token_ids": [1 << 30]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "seed": 1e30}, "seed"),
    ({"prompt": "a", "priority": 1}, "priority"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 21}, "best_of"),
    ({"prompt": "a", "best_of": 0}, "best_of"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
])
def test_bad_values_name_the_field(tiny, body, param):
    status, _, answer = tiny.request("POST", "/v1/completions", body)
    assert status == 400 and error_of(answer)["param"] == param
    assert len(error_of(answer)["message"]) > 10


@pytest.mark.parametrize("field", ["model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
                                   "stop_token_ids", "logit_bias", "logprobs", "stream", "stream_options", "ignore_eos",
                                   "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "min_tokens"])
@pytest.mark.parametrize("value", [[[[]]], {"a": {}}, "text", True, [None], -1e308])
def test_wrong_types_never_hurt(tiny, field, value):
    status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, field: value})
    assert status in (200, 400, 404), answer


@pytest.mark.parametrize("text", ['{"prompt":"a","temperature":NaN}', '{"prompt":"a","temperature":Infinity}',
                                  '{"prompt":"a","temperature":1e999}', '{"prompt":"a"', '[1,2]', '"x"', '', '{"prompt":"a"}x',
                                  '{"prompt":"a","max_tokens":01}', "{'prompt':'a'}", '{"prompt":"\xff"}', '{"prompt":"a\x01"}'])
def test_bad_json_is_400(tiny, text):
    status, _, answer = tiny.request("POST", "/v1/completions", text.encode("latin-1"))
    assert status == 400 and error_of(answer)["message"]


@pytest.mark.parametrize("depth", [100, 10000, 200000])
def test_deep_nesting(tiny, depth):
    body = '{"prompt":"a","x":' + "[" * depth + "]" * depth + "}"
    status, _, answer = tiny.request("POST", "/v1/completions", body.encode())
    assert status == 400 and "nested" in error_of(answer)["message"]


def test_nul_in_prompt_is_kept(tiny):
    n = [tiny.complete(p, max_tokens=1)["usage"]["prompt_tokens"] for p in ("ab", "ab\0cd and more text", "ab\0")]
    assert n[1] > n[2] > n[0]


def test_unknown_fields_pass(tiny):
    tiny.complete("a", max_tokens=1, some_future_field={"x": 1}, user="me")


def test_unknown_model_is_404(tiny):
    status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": "a", "model": "gpt-9"})
    assert status == 404 and error_of(answer)["code"] == "model_not_found"
    name = tiny.request("GET", "/v1/models")[2]["data"][0]["id"]
    tiny.complete("a", model=name, max_tokens=1)


def test_context_length(tiny):
    status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": list(range(300, 700)), "max_tokens": 200})
    error = error_of(answer)
    assert status == 400 and error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"] and "400" in error["message"]
    full = tiny.complete(list(range(300, 700)), max_tokens=112, ignore_eos=True)
    assert full["usage"]["total_tokens"] == 512
    status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": "word " * 100000})
    assert status == 400


def test_what_the_cache_cannot_hold_is_told_with_both_numbers(daemons):
    d = daemons("--max-model-len", "512", "--num-kv-blocks", "5")  # 4 blocks, 64 tokens
    for prompt, max_tokens, param in (([5] * 100, 5, "prompt"), ([5] * 60, 6, "max_tokens")):
        status, _, answer = d.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
        error = error_of(answer)
        assert status == 400 and error["param"] == param
        assert "64 tokens" in error["message"] and f"{len(prompt)} tokens" in error["message"]
    assert d.complete([5] * 60, max_tokens=5, ignore_eos=True)["usage"]["total_tokens"] == 65
    assert d.complete([5] * 64, ignore_eos=True, max_tokens=1)["usage"]["total_tokens"] == 65


def test_routes_and_methods(tiny):
    assert tiny.request("GET", "/nothing")[0] == 404
    status, headers, _ = tiny.request("GET", "/v1/completions")
    assert status == 405 and "POST" in headers["Allow"]
    assert tiny.request("OPTIONS", "/v1/completions")[0] == 204
    status, headers, body = tiny.request("HEAD", "/health")
    assert status == 200 and body == "" and int(headers["Content-Length"]) > 0
    assert tiny.request("GET", "/health")[2] == {"status": "ok"}
    assert tiny.request("GET", "/version")[2]["version"]
    card = tiny.request("GET", "/v1/models?x=1")[2]["data"][0]
    assert card["object"] == "model" and card["max_model_len"] == 512


def test_metrics_are_well_formed(tiny):
    before = tiny.metrics()
    tiny.complete("a b c", max_tokens=5, ignore_eos=True)
    after = tiny.metrics()
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] + 5
    assert after["paged_kv_blocks_used"] == 0
    total = after["paged_kv_blocks"]
    assert after["paged_kv_blocks_cached"] + after["paged_kv_blocks_free"] + after["paged_kv_blocks_used"] == total


def test_stop_strings_count_as_stopped(tiny):
    stop = tiny.text("And the LORD said", max_tokens=40, temperature=0)[7:13]
    before = tiny.idle()
    assert tiny.complete("And the LORD said", max_tokens=40, temperature=0, stop=[stop])["choices"][0]["finish_reason"] == "stop"
    after = tiny.idle()
    grown = {k for k in after if "request_success" in k and after[k] != before[k]}
    assert len(grown) == 2 and all('finished_reason="stop"' in k for k in grown)  # under both names
    assert after["vllm:e2e_request_latency_seconds_count"] == before["vllm:e2e_request_latency_seconds_count"] + 1


def test_keep_alive_and_pipelining(tiny):
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    body = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    out = raw(tiny, get + post + get + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert out.count(b"HTTP/1.1 200 OK") == 4
    assert out.index(b"text_completion") < out.rindex(b'{"version"')


def test_chunked_body_byte_by_byte(tiny):
    body = json.dumps({"prompt": "chunked", "max_tokens": 2, "temperature": 0}).encode()
    chunks = b"".join(b"1;ext=1\r\n" + body[i:i + 1] + b"\r\n" for i in range(len(body))) + b"0\r\nTrailer: x\r\n\r\n"
    out = raw(tiny, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert b"200 OK" in out
    answer = json.loads(out[out.index(b"\r\n\r\n") + 4:])
    assert answer["choices"][0]["text"] == tiny.text("chunked", max_tokens=2, temperature=0)


def test_expect_continue(tiny):
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=20) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 14\r\n\r\n")
        assert s.recv(100).startswith(b"HTTP/1.1 100 Continue")
        s.sendall(b'{"prompt":"a"}')
        assert b"200 OK" in s.recv(65536)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt":"a","max_tokens":2}'  # 29 bytes


@pytest.mark.parametrize("request_bytes", [
    POST + b"Content-Length: 29\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Content-Length: 29\r\nContent-Length: 3\r\n\r\n" + BODY,
    POST + b"Content-Length: -1\r\n\r\n" + BODY,
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    POST + b"Content-Length : 29\r\n\r\n" + BODY,
    POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY,
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + BODY,
    POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
    POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 5\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
])
def test_ambiguous_framing_is_refused_and_closed(tiny, request_bytes):
    out = raw(tiny, request_bytes + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert out.startswith(b"HTTP/1.1 400 ") and out.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in out


def test_upgrade_offers_are_ignored(tiny):
    """curl --http2 offers h2c; the connection goes on with HTTP/1.1, also behind a request with a body."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    out = raw(tiny, POST + offer + b"Content-Length: 29\r\n\r\n" + BODY + b"GET /version HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n"
              + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert out.count(b"HTTP/1.1 200 OK") == 3 and b"400" not in out.split(b"\r\n")[0]


def test_forms_of_the_request_line(tiny):
    close = b"Host: x\r\nConnection: close\r\n\r\n"
    assert b"200 OK" in raw(tiny, b"GET http://x:80/version HTTP/1.1\r\n" + close)
    assert b"200 OK" in raw(tiny, b"GET http://x/version?a=b HTTP/1.1\r\n" + close)
    assert b"404 Not" in raw(tiny, b"GET http://x HTTP/1.1\r\n" + close)
    assert b"204 No" in raw(tiny, b"OPTIONS * HTTP/1.1\r\n" + close)
    assert b"505 HTTP" in raw(tiny, b"GET /version HTTP/2.0\r\n" + close)
    assert b"200 OK" in raw(tiny, b"GET /version HTTP/1.0\r\n\r\n")
    assert raw(tiny, b"HEAD /version HTTP/1.1\r\n" + close).endswith(b"\r\n\r\n")
    kept = raw(tiny, b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /version HTTP/1.0\r\n\r\n")
    assert kept.count(b"200 OK") == 2
    stream = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
    out = raw(tiny, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(stream) + stream)
    assert b"chunked" not in out and out.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body,told", [
    (b'{"prompt":[' + b"1," * 4000000 + b"1]}", "values"),
    (b'{"prompt":"a","x":[' + b"[]," * 2000000 + b"1]}", "values"),
    (b'{"prompt":"a",' + b",".join(b'"k%d":1' % i for i in range(100000)) + b"}", "fields"),
    (b'{"prompt":"a","n":128,"stop":"' + b"s" * 1000000 + b'"}', "stop"),
], ids=["ids", "arrays", "fields", "stop"])
def test_bodies_cannot_stall_the_server(tiny, body, told):
    """Each of these took seconds of the io thread, or hundreds of megabytes, when nothing limited it."""
    start = time.monotonic()
    status, _, answer = tiny.request("POST", "/v1/completions", body)
    assert status == 400 and told in error_of(answer)["message"]
    assert time.monotonic() - start < 2 * SLOW


def test_many_ids_in_one_request_are_fine(tiny):
    status, _, answer = tiny.request("POST", "/v1/completions", {"prompt": [[7] * 2000] * 200})
    assert status == 400 and error_of(answer)["code"] == "context_length_exceeded"


def test_limits(daemons):
    d = daemons("--max-body-bytes", "2K", "--max-header-bytes", "1K", "--header-timeout-s", "1")
    assert d.request("POST", "/v1/completions", {"prompt": "a" * 3000})[0] == 413
    big_chunk = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"bb8\r\n" + b"a" * 3000
    assert b"413" in raw(d, big_chunk).split(b"\r\n")[0]
    assert d.request("GET", "/health", headers={"X": "a" * 2000})[0] == 431
    assert b"408" in raw(d, b"GET /health HT").split(b"\r\n")[0]
    assert b"400" in raw(d, b"\x16\x03\x01 this is not HTTP\r\n\r\n").split(b"\r\n")[0]
    assert d.request("GET", "/health")[0] == 200


def test_disconnect_aborts(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")
    for stream in (True, False):
        for close_after in (0, 3):
            with socket.create_connection(("127.0.0.1", d.port)) as s:
                body = json.dumps({"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                if stream:
                    for _ in range(close_after):
                        s.recv(4096)
                else:
                    time.sleep(0.05 * close_after)
            d.idle(timeout=2)
    assert d.metrics()["vllm:generation_tokens_total"] < 500


def test_slow_reader_is_dropped_and_hurts_nobody(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "0", "--max-output-buffer-bytes", "4K", "--max-model-len", "100000")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", d.port))
        # More than the kernel's buffers take, however slowly it comes.
        body = json.dumps({"prompt": "a", "max_tokens": 50000, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        d.wait_log("client reads too slowly")
        assert d.complete("b", max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    d.idle()


def test_client_that_takes_nothing_of_a_whole_answer_is_dropped(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "0", "--max-model-len", "30000", "--idle-timeout-s", "2")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", d.port))
        body = json.dumps({"prompt": "a", "max_tokens": 29000, "ignore_eos": True, "logprobs": 20}).encode()
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        d.wait_log("took nothing of its answer")
    assert d.idle()["paged_http_connections"] == 1


def test_over_max_connections_is_503(daemons):
    d = daemons("--max-connections", "4")
    held = [socket.create_connection(("127.0.0.1", d.port)) for _ in range(4)]
    out = raw(d, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert out.startswith(b"HTTP/1.1 503 ") and b"max_connections" in out and b"Retry-After" in out
    for s in held:
        s.close()
    wait_until(lambda: d.request("GET", "/health")[0] == 200)


def test_connections_leave_descriptors_for_a_new_worker(daemons, tmp_path):
    """With all connections open under a small descriptor limit a worker can still be replaced."""
    log = tmp_path / "log"
    with open(log, "wb") as f:
        p = subprocess.Popen(["prlimit", "--nofile=256:256", PAGED, "serve", "--port", "0", "--runtime-dir", tmp_path / "run", "--model", TINY],
                             stderr=f)
    try:
        end = time.monotonic() + 20 * SLOW
        while b"ready model" not in log.read_bytes() and time.monotonic() < end:
            time.sleep(0.02)
        text = log.read_text()
        assert "max_connections=1024 lowered to 128" in text
        port = int(text.split("http://127.0.0.1:")[1].split()[0])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        time.sleep(0.5 * SLOW)
        children = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        end = time.monotonic() + 20 * SLOW
        while log.read_bytes().count(b"ready model") < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert log.read_bytes().count(b"ready model") == 2, log.read_text()
        for s in held:
            s.close()
    finally:
        p.terminate()
    assert p.wait(20 * SLOW) == 0, log.read_text()


def test_idle_connections_cost_little(daemons):
    d = daemons()

    def rss():
        with open(f"/proc/{d.process.pid}/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))

    big = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 2000000}).encode()
    d.request("POST", "/v1/completions", big)
    before = rss()
    held = []
    for i in range(300):
        s = socket.create_connection(("127.0.0.1", d.port))
        held.append(s)
        if i < 20:  # a large body is not kept with its connection
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(big) + big)
            s.recv(65536)
    assert d.metrics()["paged_http_connections"] == 301
    assert rss() - before < 20000 * SLOW
    for s in held:
        s.close()


def test_model_name_in_metrics_is_escaped(daemons):
    d = daemons("--served-model-name", 'a"b\\c\nd' + "é" * 100)
    line = next(x for x in d.request("GET", "/metrics")[2].splitlines() if x.startswith("paged_ready"))
    assert line == 'paged_ready{model_name="a\\"b\\\\c?d' + "é" * 100 + '",engine="0"} 1'


def test_queue_full_is_told_before_the_body_is_looked_at(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "50000", "--max-queued-requests", "2")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for i in range(2):
            pool.submit(d.request, "POST", "/v1/completions", {"prompt": [i + 1], "max_tokens": 50, "ignore_eos": True})
        d.wait_held(2)
        assert d.request("POST", "/v1/completions", b"{ not JSON")[0] == 429
    assert d.request("POST", "/v1/completions", b"{ not JSON")[0] == 400


def test_queue_full_is_429(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "20000", "--max-queued-requests", "4")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: d.request("POST", "/v1/completions",
                                                    {"prompt": [i + 1], "max_tokens": 150, "ignore_eos": True}), range(16)))
    codes = [r[0] for r in results]
    assert codes.count(200) == 4 and codes.count(429) == 12
    refused = next(r for r in results if r[0] == 429)
    assert refused[1]["Retry-After"] and error_of(refused[2])
    d.idle()
    # What no empty queue could take is no matter of time.
    for body, field in (({"n": 5, "temperature": 1}, "n"), ({"prompt": [[1]] * 5}, "prompt")):
        status, _, answer = d.request("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1, **body})
        assert status == 400 and answer["error"]["param"] == field and "max_queued_requests" in answer["error"]["message"]


def test_busy_port_fails_fast(tiny, daemons):
    start = time.monotonic()
    d = daemons("--port", str(tiny.port), wait=False)
    assert d.process.wait(10) != 0
    assert time.monotonic() - start < 1.5 * SLOW
    assert "cannot listen" in d.log()
    d.log_file.close()


def test_unix_socket(daemons, tmp_path):
    path = tmp_path / "s"
    d = daemons("--uds", path, wait=False)
    d.wait_log("ready model=")
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"200 OK" in s.recv(4096)
    d.stop()
    assert not path.exists()


def test_large_bodies_at_once_are_bounded(daemons):
    """32 bodies of full size may be held; the next one is told so, and room comes back."""
    d = daemons("--max-body-bytes", "100K", "--max-connections", "100")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    held = []
    for _ in range(32):
        s = socket.create_connection(("127.0.0.1", d.port))
        s.sendall(head + b" " * 99900)
        held.append(s)
    time.sleep(0.5 * SLOW)
    out = raw(d, head + b" " * 99900)
    assert out.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in out
    assert d.request("GET", "/health")[0] == 200
    for s in held:
        s.close()
    whole = head.replace(b"Host", b"Connection: close\r\nHost") + b'{"prompt":"a","max_tokens":1}' + b" " * 99971
    wait_until(lambda: raw(d, whole).startswith(b"HTTP/1.1 200 "))


def test_fast_tokens_do_not_starve_other_clients(daemons, tmp_path):
    """The core makes tokens with logprobs as fast as the io thread can write them: others are answered all the same."""
    d = daemons("--device", "sim", "--sim-step-us", "0")
    body = json.dumps({"prompt": [5], "max_tokens": 8000, "n": 16, "logprobs": 20, "ignore_eos": True, "seed": 1})
    busy = subprocess.Popen(["curl", "-s", "-o", "/dev/null", d.url + "/v1/completions", "-d", body])
    slowest = 0
    while busy.poll() is None:
        start = time.monotonic()
        assert d.request("GET", "/health")[0] == 200
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.01)
    assert busy.returncode == 0 and slowest < 1 * SLOW


@pytest.mark.skipif(IS_SANITIZED, reason="compares times, which sanitizers change")
@pytest.mark.parametrize("what", ["parse", "hash", "detokenize", "echo", "prompt ids"])
def test_long_prompts_do_not_pause_streams(daemons, what):
    """Parsing 500,000 ids, hashing 32,000 for 64 choices, and rendering 35 MB of scored prompts is work for the pool: a
    stream goes on meanwhile."""
    d = daemons("--device", "sim", "--sim-step-us", "1000", "--max-model-len", "33000", "--num-kv-blocks", "40000")
    fields = {"echo": b'"n":4,"max_tokens":0,"echo":true,"logprobs":20', "prompt ids": b'"n":128,"max_tokens":1,"return_token_ids":true'}
    arrivals, done = [], threading.Event()

    def read_stream():
        body = b'{"prompt":[5],"max_tokens":32000,"stream":true,"ignore_eos":true,"return_token_ids":true}'
        with socket.create_connection(("127.0.0.1", d.port)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            while not done.is_set() and s.recv(65536):
                arrivals.append(time.monotonic())

    reader = threading.Thread(target=read_stream)
    reader.start()
    try:
        shares = []
        for k in range(7):
            ids = b",".join(b"%d" % ((i * 7 + k) % 480 + 20) for i in range(500000 if what in ("parse", "detokenize") else 32000))
            body = b"{" + fields.get(what, b'"n":64,"max_tokens":1') + b',"temperature":1,"prompt":[' + ids + b"]}"
            if what == "detokenize":
                body = b'{"tokens":[' + ids + b"]}"
            path = b"/detokenize" if what == "detokenize" else b"/v1/completions"
            request = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            time.sleep(0.05 * SLOW)
            start = time.monotonic()
            assert raw(d, request + body).startswith(b"HTTP/1.1 400" if what == "parse" else b"HTTP/1.1 200")
            end = time.monotonic()
            times = [t for t in list(arrivals) if start <= t <= end]
            gaps = [b - a for a, b in zip([start] + times, times + [end])]
            shares.append(max(gaps) / (end - start))
    finally:
        done.set()
        reader.join()
    assert sorted(shares)[1] < 0.5, shares  # not the middle one: other work on the machine makes gaps too


SCORED = {"prompt": [5 + i % 480 for i in range(20000)], "max_tokens": 0, "echo": True, "logprobs": 20}
LONG_SIM = ("--device", "sim", "--max-model-len", "33000", "--num-kv-blocks", "40000")


def check_scored(answer, n):
    """That nothing is missing from, or out of order in, what was rendered elsewhere and sent piece by piece."""
    assert [c["index"] for c in answer["choices"]] == list(range(n))
    for c in answer["choices"]:
        lp = c["logprobs"]
        assert len(lp["tokens"]) == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == 20000
        assert lp["text_offset"] == sorted(lp["text_offset"]) and lp["text_offset"][-1] < len(c["text"])
        assert c["finish_reason"] == "length"


def test_clients_leave_while_their_answer_is_rendered(daemons):
    d = daemons(*LONG_SIM)
    body = json.dumps(SCORED | {"n": 4, "temperature": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for k in range(16):
        with socket.create_connection(("127.0.0.1", d.port)) as s:
            s.sendall(head + body)
            time.sleep(0.06 * k)
            if k % 2:
                s.setblocking(False)
                try:
                    s.recv(100000)  # of an answer that may be on its way
                except BlockingIOError:
                    pass
    d.idle()
    status, _, answer = d.request("POST", "/v1/completions", SCORED)
    assert status == 200
    check_scored(answer, 1)
    deadline = time.monotonic() + 10 * SLOW
    while d.metrics()["paged_pool_jobs"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("wait", [0.1, 0.3, 0.5, 0.8])
def test_answers_being_rendered_survive_a_drain(daemons, wait):
    d = daemons(*LONG_SIM)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(d.request("POST", "/v1/completions", SCORED | {"n": 4, "temperature": 1})))
    thread.start()
    deadline = time.monotonic() + 10 * SLOW
    while d.metrics()["paged_kv_blocks_used"] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # the request has begun: what follows must end well
    time.sleep(wait)
    d.stop()
    thread.join()
    status, _, answer = answers[0]
    assert status == 200
    check_scored(answer, 4)


def test_a_stream_of_echoes_is_whole(daemons):
    """Each choice's prompt is the first chunk of it, whatever is generated while it is rendered."""
    d = daemons(*LONG_SIM, "--sim-step-us", "200", "--max-output-buffer-bytes", "64M")
    body = dict(max_tokens=200, echo=True, logprobs=3, n=3, temperature=1, ignore_eos=True, seed=3, return_token_ids=True)
    whole = d.request("POST", "/v1/completions", {"prompt": SCORED["prompt"], **body})[2]
    texts, ids, offsets = [""] * 3, [[] for _ in range(3)], [[] for _ in range(3)]
    n_chunks = [0] * 3
    for chunk in d.stream(SCORED["prompt"], **body):
        for c in chunk["choices"]:
            if n_chunks[c["index"]] == 0:
                assert len(c["prompt_token_ids"]) == len(c["logprobs"]["tokens"]) == 20000 and c["token_ids"] == []
            n_chunks[c["index"]] += 1
            texts[c["index"]] += c["text"]
            ids[c["index"]] += c["token_ids"]
            if c["logprobs"]:
                offsets[c["index"]] += c["logprobs"]["text_offset"]
    for c in whole["choices"]:
        assert texts[c["index"]] == c["text"] and ids[c["index"]] == c["token_ids"]
        assert offsets[c["index"]] == c["logprobs"]["text_offset"] and n_chunks[c["index"]] > 1


def test_whole_answers_are_bounded(daemons):
    d = daemons("--device", "sim")
    body = {"prompt": "a", "max_tokens": 30000, "n": 128, "logprobs": 20, "ignore_eos": True}
    status, _, answer = d.request("POST", "/v1/completions", body)
    assert status == 400 and "stream" in error_of(answer)["message"]
    stream = d.stream("a", max_tokens=30000, n=128, logprobs=20, ignore_eos=True)
    assert next(stream)["choices"]
    stream.close()
    d.idle()


def test_client_bytes_in_the_log_are_harmless(daemons):
    d = daemons()
    d.complete("a", max_tokens=1, **{"x\x1b[2J\x07\x9b1m\r\ny": 1})
    line = next(x for x in d.log().splitlines() if "unknown field" in x)
    assert "x?[2J???1m  y" in line


def test_unknown_fields_are_logged_once(daemons):
    d = daemons("--device", "sim")
    for _ in range(3):
        d.complete("a", max_tokens=1, some_new_option=1, another=[2])
    status, _, _ = d.request("POST", "/v1/completions", {"prompt": "a", "third": 1, "max_tokens": -1})
    assert status == 400
    d.stop()
    lines = [x for x in d.log().splitlines() if "unknown field" in x]
    assert [next(n for n in ("some_new_option", "another", "third") if n in x) for x in lines] == ["some_new_option", "another", "third"], lines
