"""What the OpenAPI document cannot say, for schemathesis (see scripts/check_openapi).

Some rules of a completion request relate fields to each other or to the tokenizer: min_tokens and max_tokens, n and best_of, the length of
prompt and output together, bytes that are not characters. Requests that keep the document but not these rules would be refused rightly, so they
are moved inside. Values that already break the document are left alone: those must be refused.
"""
import schemathesis

MAX_TEXT = 60
INT32_MAX = 2**31 - 1


def is_int(value, low, high):
    """JSON Schema counts 7.0 as an integer."""
    return type(value) in (int, float) and low <= value <= high and value == int(value)


def shorten(value):
    """A shorter prompt of the same kind, if it is a valid one."""
    if isinstance(value, str) and value:
        return value[:MAX_TEXT]
    if isinstance(value, list) and value:
        if all(isinstance(v, str) and v for v in value):
            return [v[:MAX_TEXT] for v in value[:4]]
        if all(is_int(v, 0, 400) for v in value):
            return value[:MAX_TEXT]
        if all(isinstance(v, list) and v and all(is_int(i, 0, 400) for i in v) for v in value):
            return [v[:MAX_TEXT] for v in value[:4]]
    return value


def relate(body):
    if "prompt" in body:
        body["prompt"] = shorten(body["prompt"])
    if is_int(body.get("max_tokens"), 17, INT32_MAX):
        body["max_tokens"] = 1 + int(body["max_tokens"]) % 16
    limit = body["max_tokens"] if is_int(body.get("max_tokens"), 0, 16) else 16
    if is_int(body.get("min_tokens"), limit + 1, INT32_MAX):
        body["min_tokens"] = limit
    if is_int(body.get("n"), 9, 128):
        body["n"] = 1 + int(body["n"]) % 8
    if is_int(body.get("best_of"), 1, 20) and is_int(body.get("n"), 2, 8):
        body["n"] = min(body["best_of"], body["n"])


def completion_body(case):
    return case.body if case.operation.path == "/v1/completions" and isinstance(case.body, dict) else {}


@schemathesis.hook
def map_case(context, case):
    relate(completion_body(case))
    return case


@schemathesis.hook
def filter_case(context, case):
    """Next to 2^63 a number of the document is finer than a double; cache_salt is counted in bytes, not in characters."""
    seed, salt = (completion_body(case).get(name) for name in ("seed", "cache_salt"))
    if type(seed) in (int, float) and 2**63 <= abs(seed) <= 2**63 + 2048:
        return False
    return not (isinstance(salt, str) and len(salt) <= 128 < len(salt.encode("utf-8", "surrogatepass")))
