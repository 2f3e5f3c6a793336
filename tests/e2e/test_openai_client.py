"""The released OpenAI Python client, unmodified, as users point it at the daemon."""
import asyncio
import concurrent.futures
import threading
import time

import openai
import pytest
from conftest import SLOW


@pytest.fixture
def client(tiny):
    return openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def joined(parts):
    """(text by choice, finish_reason by choice, last usage)"""
    texts, finishes, usage = {}, {}, None
    for p in parts:
        for c in p.choices:
            texts[c.index] = texts.get(c.index, "") + c.text
            if c.finish_reason:
                assert c.index not in finishes
                finishes[c.index] = c.finish_reason
        usage = p.usage or usage
    return texts, finishes, usage


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_completion_and_stream(client, model):
    params = {"model": model, "prompt": "In the beginning", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**params)
    assert whole.usage.completion_tokens <= 24 and whole.choices[0].finish_reason in ("length", "stop")
    parts = list(client.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    texts, finishes, usage = joined(parts)
    assert texts == {0: whole.choices[0].text} and finishes == {0: whole.choices[0].finish_reason}
    assert usage.completion_tokens == whole.usage.completion_tokens and usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({(p.id, p.created, p.model) for p in parts}) == 1
    assert joined(client.completions.create(**params, stream=True))[2] is None


def test_every_shape_of_prompt(client, model):
    text = client.completions.create(model=model, prompt=["The king", "The sea"], max_tokens=8, temperature=0)
    assert [c.index for c in text.choices] == [0, 1]
    alone = client.completions.create(model=model, prompt="The sea", max_tokens=8, temperature=0)
    assert text.choices[1].text == alone.choices[0].text
    ids = client.completions.create(model=model, prompt=[[310, 311, 312], [313]], max_tokens=4, temperature=0)
    assert len(ids.choices) == 2 and ids.usage.prompt_tokens == 4
    assert client.completions.create(model=model, prompt=[310, 311, 312], max_tokens=4, temperature=0).choices[0].text == ids.choices[0].text


def test_choices(client, model):
    params = {"model": model, "prompt": "The king", "max_tokens": 12, "temperature": 1, "seed": 4, "n": 4}
    whole = client.completions.create(**params)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3] and len({c.text for c in whole.choices}) > 1
    assert joined(client.completions.create(**params, stream=True))[0] == {c.index: c.text for c in whole.choices}


def test_best_of(client, model):
    params = {"model": model, "prompt": "The king", "max_tokens": 10, "temperature": 1.2, "seed": 4}
    every = client.completions.create(**params, n=6, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices]
    order = sorted(range(6), key=lambda i: (-means[i], i))
    best = client.completions.create(**params, n=2, best_of=6)
    assert [c.text for c in best.choices] == [every.choices[i].text for i in order[:2]]
    assert [c.index for c in best.choices] == [0, 1] and best.usage.completion_tokens == every.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(**params, n=3, best_of=2)
    assert e.value.param == "best_of"


def test_logprobs(client, model):
    c = client.completions.create(model=model, prompt="And God", max_tokens=6, temperature=0, logprobs=3).choices[0]
    assert len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) == len(c.logprobs.top_logprobs) == len(c.logprobs.text_offset)
    assert all(v <= 0 for v in c.logprobs.token_logprobs) and all(len(t) == 3 for t in c.logprobs.top_logprobs)


def test_echo(client, model):
    params = {"model": model, "prompt": "And God said", "temperature": 0}
    plain = client.completions.create(**params, max_tokens=6).choices[0].text
    assert client.completions.create(**params, max_tokens=6, echo=True).choices[0].text == "And God said" + plain
    only = client.completions.create(**params, max_tokens=0, echo=True, logprobs=1)
    c = only.choices[0]
    assert c.text == "And God said" and c.finish_reason == "length" and only.usage.completion_tokens == 0
    assert len(c.logprobs.tokens) == only.usage.prompt_tokens and c.logprobs.token_logprobs[0] is None
    assert all(v < 0 for v in c.logprobs.token_logprobs[1:])
    both = client.completions.create(**params, max_tokens=4, echo=True, logprobs=1).choices[0]
    assert both.logprobs.token_logprobs[:len(c.logprobs.tokens)] == c.logprobs.token_logprobs
    assert joined(client.completions.create(**params, max_tokens=6, echo=True, stream=True))[0] == {0: "And God said" + plain}


def test_stop(client, model):
    params = {"model": model, "prompt": "And the LORD said", "max_tokens": 40, "temperature": 0}
    full = client.completions.create(**params).choices[0].text
    stop = full[9:14]
    c = client.completions.create(**params, stop=[stop, "never seen"]).choices[0]
    assert c.text == full[:full.index(stop)] and c.finish_reason == "stop"
    texts, finishes, _ = joined(client.completions.create(**params, stop=stop, stream=True))
    assert texts == {0: c.text} and finishes == {0: "stop"}


def test_errors_become_exceptions(client, model):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt="a", max_tokens=0)
    assert e.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as e:
        client.completions.create(model="no-such-model", prompt="a")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt=[300] * 600, max_tokens=5)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt="a", temperature=3)
    assert e.value.param == "temperature" and e.value.type == "invalid_request_error" and e.value.request_id


def test_keys_become_authentication_errors(daemons, tmp_path):
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    (tmp_path / "keys").chmod(0o600)
    d = daemons("--device", "sim", "--api-key-file", tmp_path / "keys")
    for key, is_good in (("sk-one", True), ("sk-two", True), ("sk-three", False), ("sk-on", False), ("none", False)):
        c = openai.OpenAI(base_url=d.url + "/v1", api_key=key, max_retries=0)
        if is_good:
            assert c.completions.create(model="paged-tiny", prompt="a", max_tokens=1)
        else:
            with pytest.raises(openai.AuthenticationError) as e:
                c.completions.create(model="paged-tiny", prompt="a", max_tokens=1)
            assert e.value.code == "invalid_api_key"


def test_full_queue_is_retried(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000", "--max-queued-requests", "1")
    patient = openai.OpenAI(base_url=d.url + "/v1", api_key="none", max_retries=5)
    hasty = openai.OpenAI(base_url=d.url + "/v1", api_key="none", max_retries=0)
    first = threading.Thread(target=lambda: hasty.completions.create(model="paged-tiny", prompt="a", max_tokens=120,
                                                                    extra_body={"ignore_eos": True}))
    first.start()
    while d.metrics()["vllm:num_requests_running"] != 1:
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError):
        hasty.completions.create(model="paged-tiny", prompt="a", max_tokens=1)
    start = time.monotonic()
    assert patient.completions.create(model="paged-tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1
    assert time.monotonic() - start > 0.5
    first.join(60 * SLOW)


def test_closing_a_stream_ends_the_request(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")
    c = openai.OpenAI(base_url=d.url + "/v1", api_key="none", max_retries=0)
    stream = c.completions.create(model="paged-tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    for i, _ in enumerate(stream):
        if i == 3:
            break
    stream.close()
    assert d.idle(timeout=2)["vllm:generation_tokens_total"] < 500
    with pytest.raises(openai.APITimeoutError):
        c.completions.create(model="paged-tiny", prompt="a", max_tokens=2000, extra_body={"ignore_eos": True}, timeout=0.3)
    d.idle(timeout=2)


def test_async_cancel(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")

    async def go():
        async with openai.AsyncOpenAI(base_url=d.url + "/v1", api_key="none", max_retries=0) as c:
            call = asyncio.create_task(c.completions.create(model="paged-tiny", prompt="a", max_tokens=3000,
                                                            extra_body={"ignore_eos": True}))
            await asyncio.sleep(0.3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(go())
    d.idle(timeout=2)


def test_raw_response_has_a_request_id(client, model):
    raw = client.completions.with_raw_response.create(model=model, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7" and raw.parse().choices[0].finish_reason
    assert client.completions.create(model=model, prompt="a", max_tokens=1)._request_id


def test_many_streams_at_once(client, model):
    def one(i):
        parts = client.completions.create(model=model, prompt=f"Chapter {i % 8}", max_tokens=20, temperature=0, stream=True)
        return i % 8, joined(parts)[0][0]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(128)))
    by_prompt = {}
    for key, text in answers:
        by_prompt.setdefault(key, set()).add(text)
    assert all(len(texts) == 1 for texts in by_prompt.values())
