"""/openapi.json: real requests and answers hold against it, and its ranges are those that the server keeps."""

import re

import jsonschema
import pytest

UNKNOWN = {"some_field_of_the_future": {"a": [1, None]}}


@pytest.fixture(scope="module")
def document(tiny):
    status, headers, doc = tiny.request("GET", "/openapi.json")
    assert status == 200 and headers["Content-Type"] == "application/json"
    return doc


def resolve(document, node):
    while "$ref" in node:
        parts = node["$ref"].removeprefix("#/").split("/")
        node = document
        for part in parts:
            node = node[part]
    return node


def check(document, schema, value):
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def accepts(document, schema, value):
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]}).is_valid(value)


def template_of(document, path):
    path = path.split("?")[0]
    return next((t for t in document["paths"] if t == path or "{" in t and path.startswith(t[:t.index("{")])), None)


def exchange(daemon, document, method, path, body=None):
    """Sends a request, holds the answer against the document, gives (status, answer)."""
    status, headers, answer = daemon.request(method, path, body)
    operation = document["paths"][template_of(document, path)][method.lower()]
    assert str(status) in operation["responses"], f"{method} {path} answered {status}, which is not in the document"
    said = resolve(document, operation["responses"][str(status)])
    kind = headers["Content-Type"].split(";")[0]
    check(document, said["content"][kind]["schema"], answer)
    for name, header in said.get("headers", {}).items():
        value = headers[name]
        schema = resolve(document, header)["schema"]
        check(document, schema, int(value) if schema["type"] == "integer" else value)
    return status, answer


def test_document_is_valid_and_whole(tiny, document):
    assert document["openapi"].startswith("3.1.")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)

    def walk(node):
        if isinstance(node, dict):
            if "$ref" in node:
                assert resolve(document, node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    told = tiny.request("GET", "/nowhere")[2]["error"]["message"].split("this server has ")[1].split()
    assert sorted(told) == sorted(document["paths"])
    ids = [op["operationId"] for path in document["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids))
    for path, operations in document["paths"].items():
        for method in operations:
            assert method.upper() in tiny.request("OPTIONS", path)[1]["Allow"]


GOOD = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/paged-tiny", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
    ("POST", "/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("POST", "/tokenize", {"prompt": "", "model": None, "add_special_tokens": False}),
    ("POST", "/detokenize", {"tokens": [1, 5, 9]}),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3, **UNKNOWN}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "temperature": 1, "logprobs": 2, "return_token_ids": True}),
    ("POST", "/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stop": ["e", "x"], "stop_token_ids": [3], "logit_bias": {"5": -100, "0": 3}}),
    ("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "stop": "e", "user": "u", "cache_salt": "s", "priority": 0, "seed": -1}),
    ("POST", "/v1/completions", {"prompt": "a b c", "max_tokens": 2, "return_cached_tokens_details": True}),
    ("POST", "/v1/completions", {"prompt": "a b c", "max_tokens": 0, "echo": True, "logprobs": 1, "user": 3}),
    ("POST", "/v1/completions", {"prompt": "a b c", "max_tokens": 2, "best_of": 3, "temperature": 1, "logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": None, "n": None, "stop": None, "stream": None, "stream_options": None, "seed": None}),
]

BAD = [
    ("POST", "/v1/completions", {}, 400),
    ("POST", "/v1/completions", {"prompt": ""}, 400),
    ("POST", "/v1/completions", {"prompt": []}, 400),
    ("POST", "/v1/completions", {"prompt": [-1]}, 400),
    ("POST", "/v1/completions", {"prompt": [1, "a"]}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404),
    ("POST", "/v1/completions", {"prompt": "a", "stop": ""}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "stop": ["a"] * 17}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "cache_salt": ""}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "cache_salt": "a\x00b"}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "priority": 1}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "suffix": "x"}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 0}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "n": 2, "temperature": 0}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "best_of": 2, "temperature": 1, "stream": True}, 400),
    ("POST", "/v1/completions", {"prompt": "a", **{f"x{i}": 1 for i in range(256)}}, 400),
    ("POST", "/tokenize", {}, 400),
    ("POST", "/tokenize", {"prompt": "a", "model": "other"}, 404),
    ("POST", "/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400),
    ("POST", "/detokenize", {"tokens": [-1]}, 400),
    ("POST", "/detokenize", {"tokens": "a"}, 400),
]


def body_schema(document, path):
    return resolve(document, document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize("method, path, body", GOOD)
def test_good_requests(tiny, document, method, path, body):
    if body is not None:
        check(document, body_schema(document, path), body)
    assert exchange(tiny, document, method, path, body)[0] == 200


@pytest.mark.parametrize("method, path, body, want", BAD)
def test_bad_requests(tiny, document, method, path, body, want):
    assert not accepts(document, body_schema(document, path), body), "the document allows it"
    assert exchange(tiny, document, method, path, body)[0] == want


def test_unknown_model_card(tiny, document):
    assert exchange(tiny, document, "GET", "/v1/models/other")[0] == 404


def test_every_range_is_the_one_that_is_kept(tiny, document):
    """The bounds themselves are taken, what lies just outside is not, nor is another type."""
    fields = body_schema(document, "/v1/completions")["properties"]
    base = {"prompt": "a b c", "max_tokens": 1, "temperature": 1}
    n_checked = 0
    for name, schema in fields.items():
        kinds = schema.get("type", [])
        assert schema["description"]

        def status(value):
            body = {**base, name: value, **({"echo": True} if (name, value) == ("max_tokens", 0) else {})}
            return exchange(tiny, document, "POST", "/v1/completions", body)[0]

        if "integer" in kinds or "number" in kinds:
            low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
            inside = [low if "minimum" in schema else 5e-324, high]
            if name in ("max_tokens", "min_tokens"):  # bounded by the context, which is another message
                inside = [schema["minimum"]]
            step = 1 if "integer" in kinds else 1e-3
            outside = [low if "minimum" not in schema else low - step if abs(low) < 2**53 else -1e300]
            outside += [high + step if abs(high) < 2**53 else 1e300]  # a double does not know 2^63 + 1
            outside += [low + 0.5] if "integer" in kinds and abs(low) < 2**53 else []
            for value in inside:
                assert status(value) == 200, (name, value)
            for value in outside + ["1", True, [], {}]:
                assert status(value) == 400, (name, value)
            n_checked += 1
        elif "boolean" in kinds:
            assert status(True) == status(False) == 200, name
            for value in (0, 1, "true", []):
                assert status(value) == 400, (name, value)
            n_checked += 1
        if name != "prompt":
            assert status(None) == 200, name
    assert n_checked >= 15


def test_keys_of_logit_bias(tiny, document):
    pattern = body_schema(document, "/v1/completions")["properties"]["logit_bias"]["propertyNames"]["pattern"]
    last = document["components"]["schemas"]["Choice"]["properties"]["token_ids"]["items"]["maximum"]
    ids = [*range(0, last + 300)]
    assert [i for i in ids if re.search(pattern, str(i))] == [*range(last + 1)]
    for key in ("0", "9", "10", str(last), str(last + 1), str(last * 10), "00", "007", "-0", "-1", "+1", " 1", "1 ", "1.0", "", "1e1", "\u0661"):
        status = exchange(tiny, document, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": {key: 1}})[0]
        assert status == (200 if re.search(pattern, key) else 400), key


def test_numbers_that_round_to_nothing(tiny):
    """A double may be above a bound and not its float: such a request once made workers refuse their step and die."""
    pid = tiny.worker_pid()
    for field in ("top_p", "min_p", "temperature", "presence_penalty"):
        for value in (5e-324, 1e-45, 1e-40, 1.1e-38, 1.2e-38):
            tiny.complete("a", max_tokens=1, **{field: value})
    for value in (5e-324, 1e-40, 1.2e-38, 9e-4):
        assert tiny.request("POST", "/v1/completions", {"prompt": "a", "repetition_penalty": value})[0] == 400
    tiny.complete("a a a", max_tokens=5, repetition_penalty=0.001, logprobs=3)
    tiny.complete("a", max_tokens=1, temperature=5e-324, n=2)  # not the greedy 0
    assert tiny.worker_pid() == pid


def test_events_of_a_stream(tiny, document):
    event = {"$ref": "#/components/schemas/Event"}
    events = list(tiny.stream("a", max_tokens=5, n=2, temperature=1, logprobs=1, stream_options={"include_usage": True}))
    for e in events:
        check(document, event, e)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 10
    assert sum(1 for e in events for c in e["choices"] if c["finish_reason"]) == 2


def test_limits_of_this_server(daemons):
    d = daemons("--device", "sim", "--max-stop-strings", "3", "--max-logprobs", "4", "--scheduling-policy", "priority",
                "--served-model-name", 'it\'s "my" @model')
    doc = d.request("GET", "/openapi.json")[2]
    fields = body_schema(doc, "/v1/completions")["properties"]
    assert fields["logprobs"]["maximum"] == 4
    assert next(s for s in fields["stop"]["oneOf"] if s["type"] == "array")["maxItems"] == 3
    assert fields["priority"]["minimum"] == -2**31 and fields["priority"]["maximum"] == 2**31 - 1
    assert fields["model"]["enum"] == ['it\'s "my" @model', None]
    assert doc["security"] == []


def test_keys_are_in_the_document(daemons, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    d = daemons("--device", "sim", "--api-key-file", keys)
    assert d.request("GET", "/openapi.json")[0] == 401
    status, _, doc = d.request("GET", "/openapi.json", headers={"Authorization": "Bearer secret"})
    assert status == 200
    schemes = doc["components"]["securitySchemes"]
    assert {name for need in doc["security"] for name in need} == set(schemes)
    for path, operations in doc["paths"].items():
        for method, operation in operations.items():
            path = path.replace("{model}", "x")
            is_open = operation.get("security", doc["security"]) == []
            without = d.request(method.upper(), path, b"{}" if method == "post" else None)[0]
            assert (without != 401) == is_open, path
            assert d.request(method.upper(), path, b"{}" if method == "post" else None, {"X-Api-Key": "secret"})[0] != 401


def test_unknown_methods(tiny):
    for method in ("QUERY", "BREW"):
        status, headers, answer = tiny.request(method, "/version")
        assert status == 405 and "GET" in headers["Allow"] and answer["error"]["message"]
