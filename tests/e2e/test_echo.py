"""echo, logprobs of the prompt, max_tokens 0, best_of: against scores found in another way, and a stream against the whole answer."""
import concurrent.futures
import math
import os
import re
import signal
import threading

import pytest
from conftest import MISTRAL, TINY

PROMPT = "In the beginning God created the heaven and the earth."


def collect(events):
    """Choices of a stream put together: {index: choice as in a whole answer}, each checked for its own rules."""
    choices = {}
    for event in events:
        for part in event["choices"]:
            c = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None, "chunks": 0})
            assert c["finish_reason"] is None, "a chunk after the last one"
            c["text"] += part["text"]
            c["chunks"] += 1
            c["finish_reason"] = part["finish_reason"]
            c["stop_reason"] = part["stop_reason"]
            for key in ("token_ids", "prompt_token_ids"):
                if key in part:
                    assert key == "token_ids" or c["chunks"] == 1
                    c[key] = c.get(key, []) + part[key]
            if part["logprobs"] is not None:
                sums = c["logprobs"] = c["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
                for key, values in part["logprobs"].items():
                    sums[key] = sums[key] + values
    return choices


def whole_and_stream(daemon, prompt, **params):
    """The choices of a whole answer, after comparing them with a stream entry by entry."""
    choices = daemon.complete(prompt, **params)["choices"]
    streamed = collect(daemon.stream(prompt, **params))
    assert sorted(streamed) == [c["index"] for c in choices]
    for c in choices:
        got = streamed[c["index"]]
        for key, want in c.items():
            if key != "index":
                assert got[key] == want, (key, got[key], want)
    return choices


def check_logprobs(choice, n_prompt, n_top):
    lp = choice["logprobs"]
    n = len(lp["tokens"])
    assert n == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == len(lp["text_offset"]) and n >= n_prompt
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None
    assert lp["text_offset"][0] == 0 and lp["text_offset"] == sorted(lp["text_offset"])
    for token, value, top in list(zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]))[1:]:
        assert value <= 0 and token in top and 1 <= len(top) <= n_top + 1
        # Parts of characters share one key, which has the best value.
        assert top[token] == value or ("\ufffd" in token and top[token] > value)
        assert len(top) >= n_top or "\ufffd" in top


def ids_of(daemon, text):
    return daemon.complete(text, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("logprobs", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_echo_with_logprobs(tiny, logprobs, max_tokens):
    ids = ids_of(tiny, PROMPT)
    for prompt in (PROMPT, ids):
        (c,) = whole_and_stream(tiny, prompt, echo=True, logprobs=logprobs, max_tokens=max_tokens, temperature=0, return_token_ids=True)
        check_logprobs(c, len(ids), logprobs)
        assert c["prompt_token_ids"] == ids and len(c["token_ids"]) == max_tokens and c["finish_reason"] == "length"
        assert len(c["logprobs"]["tokens"]) == len(ids) + max_tokens
        assert c["text"] == PROMPT + tiny.text(PROMPT, max_tokens=max_tokens, temperature=0) if max_tokens else c["text"] == PROMPT
        for token, offset in zip(c["logprobs"]["tokens"], c["logprobs"]["text_offset"]):
            assert c["text"][offset:offset + len(token)] == token
        if max_tokens:
            plain = tiny.complete(prompt, logprobs=logprobs, max_tokens=max_tokens, temperature=0)["choices"][0]["logprobs"]
            for key in ("tokens", "token_logprobs", "top_logprobs"):
                assert c["logprobs"][key][len(ids):] == plain[key]
            assert c["logprobs"]["text_offset"][len(ids):] == [len(PROMPT) + o for o in plain["text_offset"]]


def test_prompt_scores_are_those_of_forced_tokens(tiny):
    """A token that a bias forces has the same raw log-probability as when the prompt holds it."""
    ids = ids_of(tiny, PROMPT)
    lp = tiny.complete(ids, echo=True, logprobs=2, max_tokens=0)["choices"][0]["logprobs"]
    for i in range(1, len(ids)):
        forced = tiny.complete(ids[:i], max_tokens=1, temperature=0, logprobs=2, logit_bias={str(ids[i]): 100})["choices"][0]["logprobs"]
        assert forced["token_logprobs"] == [lp["token_logprobs"][i]] and forced["top_logprobs"] == [lp["top_logprobs"][i]]


def test_evaluation_harness_call(tiny):
    """What lm-evaluation-harness sends, and how it reads the answer: log-likelihood of continuations, and whether they are greedy."""
    context = ids_of(tiny, "And God said")
    greedy = tiny.complete(context, max_tokens=4, temperature=0, return_token_ids=True, logprobs=1)["choices"][0]
    other = ids_of(tiny, " the sea was")
    batch = [context + greedy["token_ids"], context + other]
    answer = tiny.complete(batch, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    scores = []
    for choice in sorted(answer["choices"], key=lambda c: c["index"]):
        values = choice["logprobs"]["token_logprobs"][len(context):-1]
        tops = choice["logprobs"]["top_logprobs"][len(context):-1]
        scores.append((sum(values), all(v == max(t.values()) for v, t in zip(values, tops))))
    assert scores[0] == (pytest.approx(sum(greedy["logprobs"]["token_logprobs"]), abs=1e-9), True)
    assert scores[1][0] < scores[0][0] and not scores[1][1]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, batch)) and answer["usage"]["completion_tokens"] == 2
    # The prefix cache, warm or cold, changes nothing.
    assert tiny.complete(batch, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)["choices"] == answer["choices"]


def test_echo_only(tiny):
    answer = tiny.complete(PROMPT, echo=True, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["text"] == PROMPT and answer["choices"][0]["logprobs"] is None
    events = list(tiny.stream(PROMPT, echo=True, max_tokens=0, stream_options={"include_usage": True}))
    assert events[-1]["usage"] == {**answer["usage"], "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]}
    assert events[0]["choices"][0]["text"] == PROMPT
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": 0, "stream": True}):
        status, _, error = tiny.request("POST", "/v1/completions", {"prompt": "a", **body})
        assert status == 400 and error["error"]["param"] == "max_tokens"


def test_several_prompts_and_choices(tiny):
    prompts = ["And God", "The king of Egypt", [5], "a"]
    choices = whole_and_stream(tiny, prompts, n=3, echo=True, logprobs=1, max_tokens=4, temperature=1, seed=9)
    assert [c["index"] for c in choices] == list(range(12))
    for i, c in enumerate(choices):
        prompt = prompts[i // 3]
        if isinstance(prompt, str):
            assert c["text"].startswith(prompt)
        check_logprobs(c, 1, 1)
        assert c["logprobs"]["tokens"][:1] == choices[i // 3 * 3]["logprobs"]["tokens"][:1]
    assert len({c["text"] for c in choices[:3]}) > 1
    only = whole_and_stream(tiny, "The king of Egypt", n=3, echo=True, logprobs=1, max_tokens=4, temperature=1, seed=9)
    assert [c["text"] for c in only] == [c["text"] for c in choices[3:6]]


def test_first_chunk_of_each_choice_is_the_prompt(tiny):
    seen = set()
    for event in tiny.stream(["And God", "The king"], n=2, echo=True, logprobs=0, max_tokens=5, temperature=1, seed=3):
        for c in event["choices"]:
            if c["index"] not in seen:
                seen.add(c["index"])
                assert c["text"] == ["And God", "The king"][c["index"] // 2] and c["finish_reason"] is None
                assert c["logprobs"]["token_logprobs"][0] is None
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["Grüße, 世界! 👩‍👩‍👧 é", "a\x00b\n\t\"\\", "  leading and trailing  ", "<|endoftext|> <s>", "\U0001f600" * 5])
def test_unicode(tiny, text):
    ids = ids_of(tiny, text)
    (c,) = whole_and_stream(tiny, text, echo=True, logprobs=1, max_tokens=3, temperature=0)
    assert c["text"].startswith(text) and "\ufffd" not in c["text"][:len(text)]
    check_logprobs(c, len(ids), 1)
    assert c["logprobs"]["text_offset"][len(ids)] == len(text)
    (d,) = whole_and_stream(tiny, ids, echo=True, logprobs=1, max_tokens=3, temperature=0, skip_special_tokens=False)
    check_logprobs(d, len(ids), 1)
    assert d["logprobs"]["token_logprobs"] == c["logprobs"]["token_logprobs"]
    assert d["logprobs"]["text_offset"] == c["logprobs"]["text_offset"] and d["text"] == c["text"]


def test_ids_that_are_no_text(tiny):
    """A prompt that ends inside a character, one of every token of a range: valid JSON, offsets inside the text."""
    emoji = ids_of(tiny, "\U0001f600")
    prompts = [emoji[:-1] or emoji, list(range(300)), [0], [3, 3, 3]]
    for prompt in prompts:
        (c,) = whole_and_stream(tiny, prompt, echo=True, logprobs=1, max_tokens=2, temperature=0)
        check_logprobs(c, len(prompt), 1)
        assert all(o <= len(c["text"]) for o in c["logprobs"]["text_offset"])
        assert c["text"] == tiny.text(prompt, echo=True, max_tokens=2, temperature=0)


def test_sentencepiece(daemons):
    """With a BOS that the tokenizer adds and a leading space that the text has not."""
    daemon = daemons("--max-model-len", "256", model=MISTRAL)
    text = "And God said, Let there be light"
    ids = ids_of(daemon, text)
    (c,) = whole_and_stream(daemon, text, echo=True, logprobs=2, max_tokens=3, temperature=0)
    lp = c["logprobs"]
    check_logprobs(c, len(ids), 2)
    assert c["text"].startswith(text) and lp["text_offset"][len(ids)] == len(text)
    (d,) = whole_and_stream(daemon, ids, echo=True, logprobs=2, max_tokens=3, temperature=0)
    assert d == c
    # Special tokens of the prompt are not in the text, but they have entries.
    assert lp["text_offset"][:2] == [0, 0] and lp["tokens"][0] == "<s>"
    for token, a, b in list(zip(lp["tokens"], lp["text_offset"], lp["text_offset"][1:]))[2:len(ids)]:
        assert c["text"][a:b] == token


def test_stop_strings_are_looked_for_in_generated_text_only(tiny):
    full = tiny.text(PROMPT, max_tokens=30, temperature=0)
    (c,) = whole_and_stream(tiny, PROMPT, echo=True, logprobs=1, max_tokens=30, temperature=0, stop=["beginning"])
    assert c["text"] == PROMPT + full.split("beginning")[0]
    stop = full[5:12]
    (c,) = whole_and_stream(tiny, PROMPT, echo=True, logprobs=1, max_tokens=30, temperature=0, stop=[stop])
    assert c["text"] == PROMPT + full[:full.index(stop)] and c["stop_reason"] == stop
    # One that begins in the prompt and ends in the answer is none.
    (c,) = whole_and_stream(tiny, PROMPT, echo=True, max_tokens=30, temperature=0, stop=[PROMPT[-3:] + full[:3]])
    assert c["text"] == PROMPT + full


def test_stream_in_step_without_echo(tiny):
    params = dict(n=3, logprobs=2, max_tokens=25, temperature=1, seed=5, stop=["the", "and"], return_token_ids=True)
    for c in whole_and_stream(tiny, ["And God", "The king"], **params):
        assert len(c["token_ids"]) == len(c["logprobs"]["tokens"])
        assert "".join(c["logprobs"]["tokens"]).startswith(c["text"])


def test_best_of(tiny):
    params = dict(max_tokens=6, temperature=1, seed=77, logprobs=0)
    every = tiny.complete(["And God", "The king"], n=8, **params)
    best = tiny.complete(["And God", "The king"], n=3, best_of=8, **params)
    assert [c["index"] for c in best["choices"]] == list(range(6))
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]

    def mean(c):
        return sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"])
    for p in range(2):
        order = sorted(every["choices"][8 * p:8 * p + 8], key=lambda c: -mean(c))[:3]
        assert [c["text"] for c in best["choices"][3 * p:3 * p + 3]] == [c["text"] for c in order]
    del params["logprobs"]
    plain = tiny.complete(["And God", "The king"], n=3, best_of=8, **params)
    assert [c["text"] for c in plain["choices"]] == [c["text"] for c in best["choices"]]
    assert all(c["logprobs"] is None for c in plain["choices"])
    assert tiny.complete("And God", best_of=3, max_tokens=0, echo=True)["choices"][0]["text"] == "And God"
    assert len(list(tiny.stream("And God", best_of=1, max_tokens=2))) >= 1


def test_limits(tiny, sim):
    ids = [7] * 30000
    cases = [(dict(logprobs=20, echo=True, n=20, max_tokens=1), "logprobs"),
             (dict(logprobs=20, echo=True, best_of=20, max_tokens=0), "logprobs"),
             (dict(logprobs=20, echo=True, max_tokens=1, stream=True), "echo"),
             (dict(echo=True, n=40, max_tokens=1, stream=True), "echo")]
    for params, param in cases:
        status, _, error = sim.request("POST", "/v1/completions", {"prompt": ids, **params})
        assert status == 400 and error["error"]["param"] == param, error
    answer = sim.complete(ids, logprobs=2, echo=True, max_tokens=0)
    check_logprobs(answer["choices"][0], len(ids), 2)
    full = [9] * 511  # the most that the context takes
    (c,) = whole_and_stream(tiny, full, logprobs=1, echo=True, max_tokens=0)
    assert len(c["logprobs"]["tokens"]) == 511
    assert tiny.request("POST", "/v1/completions", {"prompt": full + [9], "echo": True, "max_tokens": 0})[0] == 400


def test_chunks_batches_and_preemption_change_nothing(daemons, tiny):
    """A pool so small that prompts are preempted, and chunks of a few tokens: the very same numbers."""
    prompts = [ids_of(tiny, PROMPT)[: 3 + 2 * i] * (1 + i) for i in range(6)]
    params = dict(logprobs=3, echo=True, max_tokens=20, temperature=0.7, seed=4)
    want = [tiny.complete(p, **params)["choices"] for p in prompts]
    for flags in (["--max-num-batched-tokens", "7"], ["--num-kv-blocks", "11", "--max-model-len", "160", "--max-num-seqs", "6"]):
        daemon = daemons(*flags)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda p: daemon.complete(p, **params)["choices"], prompts * 2))
        assert got == want * 2
        if "--num-kv-blocks" in flags:
            assert daemon.idle()["vllm:num_preemptions_total"] > 0


def test_worker_killed_inside_a_prompt(daemons, tiny):
    prompt = (ids_of(tiny, PROMPT) * 40)[:400]
    params = dict(logprobs=2, echo=True, max_tokens=8, temperature=0)
    want = tiny.complete(prompt, **params)["choices"]
    daemon = daemons("--max-num-batched-tokens", "4", "--max-model-len", "512")
    stop = threading.Event()
    kills = []

    def kill_often():
        while len(kills) < 3 and not stop.wait(0.05):
            found = re.findall(r"worker ready pid=(\d+)", daemon.log())
            if found and found[-1] not in kills:
                kills.append(found[-1])
                os.kill(int(found[-1]), signal.SIGKILL)
    killer = threading.Thread(target=kill_often)
    killer.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            got = list(pool.map(lambda _: daemon.complete(prompt, **params)["choices"], range(6)))
    finally:
        stop.set()
        killer.join()
    assert got == [want] * 6 and kills
    assert collect(daemon.stream(prompt, **params))[0]["logprobs"] == want[0]["logprobs"]


def test_simulated_worker(sim, daemons):
    """Long prompts in chunks on the simulated worker: the same numbers whatever the chunks."""
    prompt = [(i * 31) % 1000 for i in range(3000)]
    params = dict(logprobs=2, echo=True, max_tokens=2, temperature=0)
    want = sim.complete(prompt, **params)["choices"]
    check_logprobs(want[0], len(prompt), 2)
    daemon = daemons("--device", "sim", "--max-num-batched-tokens", "97", model=TINY)
    assert daemon.complete(prompt, **params)["choices"] == want


def test_clients_that_leave(sim):
    for _ in range(3):
        events = sim.stream([list(range(600))] * 2, n=2, echo=True, logprobs=5, max_tokens=500)
        next(events)
        events.close()
    whole = threading.Thread(target=lambda: sim.request("POST", "/v1/completions", {
        "prompt": [5] * 20000, "echo": True, "logprobs": 20, "max_tokens": 0}))
    whole.start()
    whole.join()
    m = sim.idle()
    assert m["paged_kv_blocks_used"] == 0


def test_scores_are_finite_numbers_that_add_up(tiny):
    """The mean over a text that the model knows is far better than over the same words in disorder."""
    words = PROMPT.split()
    texts = [PROMPT, " ".join(reversed(words))]
    means = []
    for c in tiny.complete(texts, echo=True, logprobs=0, max_tokens=0)["choices"]:
        values = c["logprobs"]["token_logprobs"][1:]
        assert all(math.isfinite(v) and v <= 0 for v in values)
        means.append(sum(values) / len(values))
    assert means[0] > means[1] + 1
