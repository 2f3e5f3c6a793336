"""The endpoints beside completions: model cards, tokenize and detokenize, prefix-cache reset."""
import concurrent.futures
import http.client
import json
import socket
import time
import urllib.parse

import openai
import pytest


def error(daemon, status, method, path, body=None):
    got, _, answer = daemon.request(method, path, body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["message"]
    return answer["error"]


@pytest.mark.parametrize("name", ["org/model-7B", "a b/ü%41?x#y", "plain"])
def test_model_card_by_id(daemons, name):
    d = daemons("--device", "sim", "--served-model-name", name)
    listed = d.request("GET", "/v1/models")[2]["data"]
    assert [m["id"] for m in listed] == [name]
    for path in {urllib.parse.quote(name, safe="/"), urllib.parse.quote(name, safe="")}:
        status, _, card = d.request("GET", "/v1/models/" + path + "?verbose=1")
        assert (status, card) == (200, listed[0])
    status, headers, body = d.request("HEAD", "/v1/models/" + urllib.parse.quote(name))
    assert status == 200 and body == "" and int(headers["Content-Length"]) > 0


def test_openai_client_retrieves_a_model(daemons):
    d = daemons("--device", "sim", "--served-model-name", "org/model v1")
    client = openai.OpenAI(base_url=d.url + "/v1", api_key="x", max_retries=0)
    assert client.models.retrieve("org/model v1").id == client.models.list().data[0].id == "org/model v1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.mark.parametrize("path", ["other", "paged-tiny/", "/paged-tiny", "%", "%zz", "%00", "paged%2dtin", "x" * 8000])
def test_unknown_model_is_404(tiny, path):
    e = error(tiny, 404, "GET", "/v1/models/" + path)
    assert e["code"] == "model_not_found" and e["param"] == "model" and "paged-tiny" in e["message"]


def test_model_routes_know_their_methods(tiny):
    assert tiny.request("GET", "/v1/models/paged%2Dtiny")[0] == 200
    assert tiny.request("POST", "/v1/models/paged-tiny")[0] == 405
    assert "no such path" in error(tiny, 404, "GET", "/v1/models/")["message"]
    assert tiny.request("GET", "/tokenize")[1]["Allow"] == "POST, OPTIONS"


def test_tokenize_equals_what_a_completion_counts(tiny):
    text = "And the LORD said unto Moses ü\U0001f600 <|nothing|>"
    status, _, answer = tiny.request("POST", "/tokenize", {"prompt": text, "return_token_strs": True, "unknown": 1})
    assert status == 200
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert tiny.complete(text, max_tokens=1)["usage"]["prompt_tokens"] == answer["count"]
    bare = tiny.request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False, "model": "paged-tiny"})[2]
    assert bare["token_strs"] is None
    assert tiny.request("POST", "/detokenize", {"tokens": bare["tokens"]})[2] == {"prompt": text}
    assert answer["tokens"][-bare["count"]:] == bare["tokens"]


def test_tokenize_smallest_and_largest(tiny):
    bare = {"add_special_tokens": False}
    assert tiny.request("POST", "/tokenize", {"prompt": "", **bare})[2]["tokens"] == []
    assert tiny.request("POST", "/detokenize", {"tokens": []})[2] == {"prompt": ""}
    big = "word " * 100000
    answer = tiny.request("POST", "/tokenize", {"prompt": big, **bare})[2]
    assert tiny.request("POST", "/detokenize", {"tokens": answer["tokens"]})[2]["prompt"] == big
    e = error(tiny, 400, "POST", "/tokenize", {"prompt": "\x01" * 600000, **bare})
    assert e["param"] == "prompt" and "524288" in e["message"]


def test_detokenize_shows_broken_characters_and_special_tokens(tiny):
    pieces = tiny.request("POST", "/tokenize", {"prompt": "\U0001f600", "add_special_tokens": False})[2]["tokens"]
    assert len(pieces) > 1
    assert tiny.request("POST", "/detokenize", {"tokens": pieces[:-1]})[2]["prompt"] == "\ufffd"
    with_special = tiny.request("POST", "/tokenize", {"prompt": "x", "return_token_strs": True})[2]
    text = tiny.request("POST", "/detokenize", {"tokens": with_special["tokens"]})[2]["prompt"]
    assert text == "".join(with_special["token_strs"])


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ("/tokenize", {"prompt": "a", "model": 3}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "1"}, "tokens"),
    ("/detokenize", {"tokens": [1, "2"]}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1e300]}, "tokens"),
    ("/detokenize", {"tokens": [2**31]}, "tokens"),
    ("/detokenize", {"tokens": [1], "model": []}, "model"),
])
def test_bad_fields_are_named(tiny, path, body, param):
    assert error(tiny, 400, "POST", path, body)["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_bad_bodies(tiny, path):
    for body in [b"", b"[]", b"7", b"{", b'{"prompt": "\xff"}', b'{"tokens": [' + b"[" * 100]:
        assert error(tiny, 400, "POST", path, body)["param"] is None
    e = error(tiny, 404, "POST", path, {"prompt": "a", "tokens": [1], "model": "other"})
    assert e["code"] == "model_not_found"


def test_tokens_flow_while_long_texts_are_tokenized(tiny):
    """Big jobs, clients that leave in the middle, and a completion that must not notice."""
    body = json.dumps({"prompt": "In the beginning " * 60000}).encode()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(tiny.request, "POST", "/tokenize", body) for _ in range(6)]
        for _ in range(6):
            s = socket.create_connection(("127.0.0.1", tiny.port))
            s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            s.close()
        assert tiny.complete([5, 6, 7], max_tokens=8, ignore_eos=True)["usage"]["completion_tokens"] == 8
        counts = {job.result()[2]["count"] for job in jobs}
    assert len(counts) == 1


def test_texts_that_wait_are_bounded(daemons):
    d = daemons("--device", "sim", "--max-queued-requests", "2")
    body = json.dumps({"prompt": "In the beginning " * 20000}).encode()
    conns = [http.client.HTTPConnection("127.0.0.1", d.port) for _ in range(12)]
    for conn in conns:
        conn.request("POST", "/tokenize", body)
    statuses = [conn.getresponse().status for conn in conns]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 2
    assert d.request("POST", "/tokenize", {"prompt": "a"})[0] == 200


def test_reset_prefix_cache(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000", "--num-kv-blocks", "200")
    prompt = list(range(100, 180))

    def cached():
        answer = d.complete(prompt, max_tokens=1, ignore_eos=True)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 64)
    d.idle()
    assert d.request("POST", "/reset_prefix_cache")[::2] == (200, {"reset": True})
    assert d.metrics()["paged_kv_blocks_cached"] == 0
    assert (cached(), cached()) == (0, 64)
    stream = d.stream(prompt, max_tokens=400, ignore_eos=True)
    next(stream)
    status, _, answer = d.request("POST", "/reset_prefix_cache", b"whatever")
    assert status == 200 and answer["reset"] is False and "running" in answer["reason"]
    assert sum(1 for _ in stream) > 0
    assert cached() == 64
    d.idle()
    assert d.request("POST", "/reset_prefix_cache")[2] == {"reset": True}


def test_reset_prefix_cache_when_it_is_off(daemons):
    d = daemons("--device", "sim", "--no-enable-prefix-caching")
    answer = d.request("POST", "/reset_prefix_cache")[2]
    assert answer["reset"] is False and "enable_prefix_caching" in answer["reason"]


def test_resets_by_many_and_by_clients_that_leave(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "1000")
    end = time.monotonic() + 2
    n_true = 0
    while time.monotonic() < end:
        socks = [socket.create_connection(("127.0.0.1", d.port)) for _ in range(8)]
        for i, s in enumerate(socks):
            s.sendall(b"POST /reset_prefix_cache HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            if i % 2:
                s.close()
        for s in socks[::2]:
            data = s.recv(4096)
            assert b"200 OK" in data and b'"reset"' in data
            n_true += b"true" in data
            s.close()
        d.complete([1, 2, 3], max_tokens=2)
    assert n_true > 0
    d.idle()
    assert d.request("POST", "/reset_prefix_cache")[2] == {"reset": True}
