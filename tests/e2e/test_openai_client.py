"""The released OpenAI Python client, unmodified, as users point it at the daemon."""
import concurrent.futures

import openai
import pytest


@pytest.fixture
def client(tiny):
    return openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0)


def test_completion_and_stream(client):
    model = client.models.list().data[0].id
    params = {"model": model, "prompt": "In the beginning", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**params)
    assert whole.usage.completion_tokens <= 24 and whole.choices[0].finish_reason in ("length", "stop")
    parts = list(client.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for p in parts for c in p.choices) == whole.choices[0].text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_errors_become_exceptions(client):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=client.models.list().data[0].id, prompt="a", max_tokens=0)
    assert e.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="a")
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=client.models.list().data[0].id, prompt=[300] * 600, max_tokens=5)
    assert e.value.code == "context_length_exceeded"


def test_many_streams_at_once(client):
    model = client.models.list().data[0].id

    def one(i):
        parts = client.completions.create(model=model, prompt=f"Chapter {i % 8}", max_tokens=20, temperature=0, stream=True)
        return i % 8, "".join(c.text for p in parts for c in p.choices)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(64)))
    by_prompt = {}
    for key, text in answers:
        by_prompt.setdefault(key, set()).add(text)
    assert all(len(texts) == 1 for texts in by_prompt.values())
