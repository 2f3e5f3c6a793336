"""/metrics: the page is well formed, counters never fall, gauges come back to zero, and the dashboard shows only what exists."""
import concurrent.futures
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import ROOT, SLOW
from metrics_page import flatten, parse, rising

# As read from vLLM; what dashboards, autoscalers and endpoint pickers know.
VLLM_LATENCY = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
VLLM_ITL = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
VLLM_TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
TOKENS_TO_512 = [1, 2, 5, 10, 20, 50, 100, 200, 500]


def page(daemon):
    status, headers, text = daemon.request("GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return text


def values(daemon):
    """{name{labels other than model_name and engine}: value}"""
    out = {}
    for (name, labels), value in flatten(parse(page(daemon))).items():
        own = ",".join(f"{k}={v}" for k, v in sorted(labels) if k not in ("model_name", "engine"))
        out[name + (f"{{{own}}}" if own else "")] = value
    return out


def promtool(text):
    """(exit status, findings)"""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


@pytest.fixture(scope="module")
def used(tiny):
    """The shared daemon after a bit of everything."""
    tiny.complete("And the LORD said", max_tokens=5, n=2, temperature=1, seed=1)
    tiny.complete(["a", "b"], max_tokens=3, stop=["e"])
    next(tiny.stream("left", max_tokens=400, ignore_eos=True))
    tiny.request("POST", "/v1/completions", {"prompt": 3.5})
    tiny.idle()
    return tiny


def test_page_is_well_formed(used):
    text = page(used)
    families = parse(text)
    assert all(name.startswith(("paged_", "vllm:", "process_")) for name in families)
    for name, (_, samples) in families.items():
        assert samples, f"{name} has no sample"
        for _, labels in samples:
            assert name.startswith("process_") or {"model_name", "engine"} <= dict(labels).keys()
    theirs = list(text_string_to_metric_families(text))
    assert len(theirs) == len(families)
    assert sum(len(f.samples) for f in theirs) == len(flatten(families))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_promtool_has_nothing_to_say(used):
    """Colons are meant for recording rules, so it says so of every vllm: name, and of nothing else."""
    text = page(used)
    blocks = [b for b in re.split(r"(?=^# HELP )", text, flags=re.M) if b]
    own = "".join(b for b in blocks if not b.startswith("# HELP vllm:"))
    assert promtool(own) == (0, [])
    _, findings = promtool(text)
    assert [f for f in findings if not re.match(r"vllm:\S+ metric names should not contain ':'", f)] == []


def test_vllm_names_have_their_bounds_and_a_twin(used):
    families = parse(page(used))
    known = {name[5:]: f for name, f in families.items() if name.startswith("vllm:")}
    assert {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
            "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds",
            "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
            "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
            "cache_config_info"} <= set(known)
    for name, (kind, samples) in known.items():
        twin = families["paged_" + name]
        assert twin[0] == kind
        for (sample, labels), value in samples.items():
            assert twin[1][("paged_" + sample[5:], labels)] == value

    def bounds(name):
        return [float(dict(labels)["le"]) for (sample, labels), _ in known[name][1].items() if sample.endswith("_bucket")][:-1]

    assert bounds("time_to_first_token_seconds") == VLLM_TTFT
    assert bounds("inter_token_latency_seconds") == VLLM_ITL
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                 "request_inference_time_seconds"):
        assert bounds(name) == VLLM_LATENCY
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"):
        assert bounds(name) == TOKENS_TO_512
    config = dict(next(labels for _, labels in known["cache_config_info"][1]))
    assert config["block_size"] == "16" and int(config["num_gpu_blocks"]) == flatten(families)[
        next(key for key in flatten(families) if key[0] == "paged_kv_blocks")]


def test_one_request_moves_the_right_series(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "20000", "--max-num-batched-tokens", "32", "--no-enable-prefix-caching")
    before = values(d)
    d.complete(list(range(1000, 1080)), max_tokens=6, ignore_eos=True, n=2, temperature=1, seed=5)
    d.idle()
    grown = {k: v - before.get(k, 0) for k, v in values(d).items() if v != before.get(k, 0)}
    assert grown["paged_prompt_tokens_total"] == 160
    assert grown["paged_generation_tokens_total"] == 12
    assert grown["paged_request_success_total{finished_reason=length}"] == 2
    assert grown["paged_prompt_tokens_by_source_total{source=computed}"] == 160
    assert grown["paged_request_prefill_kv_computed_tokens_sum"] == 160
    assert grown["paged_request_params_n_count"] == 1 and grown["paged_request_params_n_sum"] == 2
    assert grown["paged_request_params_max_tokens_sum"] == 6
    assert grown["paged_request_max_num_generation_tokens_sum"] == 6
    assert grown["paged_request_max_num_generation_tokens_count"] == 1
    assert grown["paged_request_generation_tokens_sum"] == 12
    assert grown["paged_inter_token_latency_seconds_count"] == 10
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
                 "request_inference_time", "request_time_per_output_token"):
        assert grown[f"paged_{name}_seconds_count"] == 2, name
    total = {name: grown[f"paged_{name}_seconds_sum"] for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time",
                                                                   "request_decode_time", "request_inference_time", "time_to_first_token")}
    close = pytest.approx
    assert total["request_prefill_time"] + total["request_decode_time"] == close(total["request_inference_time"], abs=1e-5)
    assert total["request_queue_time"] + total["request_inference_time"] == close(total["e2e_request_latency"], abs=0.01 * SLOW)
    assert total["request_queue_time"] + total["request_prefill_time"] == close(total["time_to_first_token"], abs=1e-5)
    # 80 tokens are three steps. A busy machine may see the first token late, which makes decoding look shorter, but not the whole.
    assert total["request_prefill_time"] >= 2 * 3 * 0.02
    assert total["request_inference_time"] >= 2 * (3 + 5) * 0.02 and total["request_decode_time"] >= 5 * 0.02
    assert grown["paged_steps_total"] == grown["paged_iteration_tokens_count"]
    assert grown["paged_iteration_tokens_sum"] == 160 + 2 * 5  # the last token of each is never computed
    assert not [name for name in grown if "cache" in name or "preempt" in name and name.endswith("sum") or "reject" in name]


def test_time_in_the_queue(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "10000", "--max-num-seqs", "1")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for i in (1, 2):
            pool.submit(d.complete, [i], max_tokens=30, ignore_eos=True)
    v = values(d)
    assert v["paged_request_queue_time_seconds_count"] == 2
    assert 0.25 <= v["paged_request_queue_time_seconds_sum"] <= 0.5 * SLOW
    assert v['paged_request_queue_time_seconds_bucket{le=0.1}'] == 1


def test_finish_reasons(daemons):
    d = daemons("--device", "sim", "--sim-step-us", "5000")
    text = d.text([7, 8, 9], max_tokens=20, ignore_eos=True, temperature=0)
    d.complete([7, 8, 9], max_tokens=20, ignore_eos=True, temperature=0, stop=[text[4:9]])
    next(d.stream([1], max_tokens=5000, ignore_eos=True))
    d.idle()
    v = values(d)
    assert {r: v[f"paged_request_success_total{{finished_reason={r}}}"] for r in ("stop", "length", "abort", "error")} == {
        "stop": 1, "length": 1, "abort": 1, "error": 0}
    assert v["paged_e2e_request_latency_seconds_count"] == 2


def test_preemptions_and_recomputed_tokens(daemons):
    """A pool too small for what runs: preempted requests compute their prompts again."""
    d = daemons("--device", "sim", "--sim-step-us", "500", "--num-kv-blocks", "24", "--no-enable-prefix-caching", "--max-model-len", "300")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: d.complete([i] * 64, max_tokens=150, ignore_eos=True), range(1, 5)))
    d.idle()
    v = values(d)
    assert v["paged_num_preemptions_total"] > 0
    assert v["paged_request_num_preemptions_sum"] == v["paged_num_preemptions_total"]
    assert v["paged_prompt_tokens_by_source_total{source=computed}"] == v["paged_prompt_tokens_total"] == 256
    assert v["paged_prompt_tokens_recomputed_total"] >= 64
    assert v["paged_prompt_tokens_cached_total"] == 0
    assert v["paged_request_prefill_kv_computed_tokens_sum"] == 256


def test_kv_block_residency(daemons, used):
    """Asked for: how long cached blocks live, lie idle and wait for their next use. Not shown otherwise."""
    assert "kv_block_" not in page(used)
    d = daemons("--device", "sim", "--num-kv-blocks", "24", "--max-model-len", "300", "--kv-cache-metrics", "--kv-cache-metrics-sample", "1")
    d.complete([1] * 64, max_tokens=2, ignore_eos=True)
    time.sleep(0.3)
    d.complete([1] * 64, max_tokens=2, ignore_eos=True)  # hits 3 blocks of 16
    d.idle()
    v = values(d)
    for prefix in ("paged_", "vllm:"):
        assert v[prefix + "kv_block_reuse_gap_seconds_count"] == 3 and 0.9 < v[prefix + "kv_block_reuse_gap_seconds_sum"] < 60
        assert v[prefix + "kv_block_lifetime_seconds_count"] == v[prefix + "kv_block_idle_before_evict_seconds_count"] == 0
    for i in range(2, 5):
        d.complete([i] * 200, max_tokens=2, ignore_eos=True)  # 13 of 23 blocks each
    d.idle()
    v = values(d)
    n = v["vllm:kv_block_lifetime_seconds_count"]
    assert n >= 12 and v["vllm:kv_block_idle_before_evict_seconds_count"] == n
    assert v["vllm:kv_block_lifetime_seconds_sum"] >= v["vllm:kv_block_idle_before_evict_seconds_sum"] + 0.9
    bounds = [float(k.split("le=")[1].rstrip("}")) for k in v if k.startswith("vllm:kv_block_lifetime_seconds_bucket")]
    assert bounds[:4] == [0.001, 0.002, 0.005, 0.01] and bounds[-2:] == [1800, float("inf")]


def test_counters_never_fall_and_gauges_return_to_zero(daemons):
    """Load with prefix hits, preemption, clients that leave and workers that die, while somebody scrapes."""
    d = daemons("--device", "sim", "--sim-step-us", "1000", "--num-kv-blocks", "40", "--max-model-len", "300", "--max-num-seqs", "8")
    idle_before = values(d)
    stop = threading.Event()
    n_pages = 0

    def load(i):
        n = 0
        while not stop.is_set():
            prompt = [1 + n % 3] * 40 + [i]
            if n % 5 == 4:
                next(d.stream(prompt, max_tokens=200, ignore_eos=True))
            else:
                d.complete(prompt, max_tokens=100, ignore_eos=True)
            n += 1

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(load, i) for i in range(10)]
        try:
            last = {}
            end = time.monotonic() + 6
            kill_at = time.monotonic() + 1
            while time.monotonic() < end:
                now = rising(parse(page(d)))
                for key, value in last.items():
                    assert now[key] >= value, f"{key} fell from {value} to {now.get(key)}"
                last = now
                n_pages += 1
                if time.monotonic() > kill_at:
                    d.kill_worker()
                    d.wait_ready_again()
                    kill_at = time.monotonic() + 1
                time.sleep(0.05)
        finally:
            stop.set()
        for job in jobs:
            job.result()
    d.idle()
    v = values(d)
    assert n_pages > 20 / SLOW and v["paged_num_preemptions_total"] > 0 and v["paged_prefix_cache_hits_total"] > 0
    assert v["paged_worker_restarts_total{reason=signal}"] >= 2
    assert v["paged_prompt_tokens_recomputed_total"] > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert v["paged_" + name] == v["vllm:" + name] == 0
    assert v["paged_num_requests_waiting_by_reason{reason=capacity}"] == v["paged_num_requests_waiting_by_reason{reason=deferred}"] == 0
    assert v["paged_pool_jobs"] == v["paged_kv_blocks_used"] == 0
    assert v["paged_kv_blocks_cached"] + v["paged_kv_blocks_free"] == v["paged_kv_blocks"] == idle_before["paged_kv_blocks"]
    assert v["paged_ready"] == 1
    n_ended = sum(value for key, value in v.items() if key.startswith("paged_request_success_total"))
    assert n_ended >= v["paged_e2e_request_latency_seconds_count"] > 0


def test_worker_and_process_series(daemons):
    d = daemons("--device", "sim")
    v = values(d)
    worker = [key for key in v if key.startswith("paged_worker_info{")]
    assert len(worker) == 1 and f"pid={d.worker_pid()}," in worker[0] and "device=sim" in worker[0] and "rank=0" in worker[0]
    assert 0 < v["process_cpu_seconds_total"] < 60 and v["process_resident_memory_bytes"] > 1e6
    with open(f"/proc/{d.process.pid}/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert v["process_resident_memory_bytes"] == pytest.approx(resident, rel=0.2)
    assert v["process_open_fds"] == pytest.approx(len(os.listdir(f"/proc/{d.process.pid}/fd")), abs=3)
    assert v["process_start_time_seconds"] == pytest.approx(time.time() - v["paged_uptime_seconds"], abs=2 * SLOW)
    assert v["paged_limit{limit=max_queued_requests}"] == 512


def test_http_series(daemons):
    d = daemons("--device", "sim", "--max-connections", "3", "--max-output-buffer-bytes", "4096", "--sim-step-us", "100")
    d.complete([1, 2, 3], max_tokens=3)
    d.request("POST", "/v1/completions", {"prompt": 7})
    d.request("GET", "/v1/models/a/b?x=1")
    d.request("BREW", "/nowhere" * 10)
    d.request("HEAD", "/health")
    with socket.create_connection(("127.0.0.1", d.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": [5], "max_tokens": 20000, "n": 8, "stream": True, "ignore_eos": True, "temperature": 1, "logprobs": 5})
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        end = time.monotonic() + 20 * SLOW
        while values(d)["paged_http_clients_dropped_total{reason=slow}"] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
    held = [socket.create_connection(("127.0.0.1", d.port)) for _ in range(3)]
    with socket.create_connection(("127.0.0.1", d.port)) as refused:
        assert b"503" in refused.recv(4096)
    for s in held:
        s.close()
    end = time.monotonic() + 10 * SLOW
    while d.request("GET", "/version")[0] != 200:  # until the server has seen them go
        assert time.monotonic() < end
    d.idle()
    v = values(d)
    refused_now = v["paged_http_connections_refused_total"]
    assert {k[len("paged_http_requests_total{"):-1]: n for k, n in v.items() if k.startswith("paged_http_requests_total") and "/metrics" not in k and "/version" not in k} == {
        "handler=/v1/completions,method=POST,status=200": 2,
        "handler=/v1/completions,method=POST,status=400": 1,
        "handler=/v1/models/{model},method=GET,status=404": 1,
        "handler=/health,method=HEAD,status=200": 1,
        "handler=other,method=other,status=405": 1,
        "handler=other,method=other,status=503": refused_now,
    }
    assert v["paged_http_request_duration_seconds_count{handler=/v1/completions}"] == 3
    assert refused_now >= 1 and v["paged_http_connections"] <= 3
    assert v["paged_http_connections_total"] >= 10
    assert v["paged_http_timeouts_total{timeout=header}"] == 0
    assert v["paged_http_request_size_bytes_total"] > 100 and v["paged_http_response_size_bytes_total"] > 5000


def test_tiers_have_their_series(used, daemons, tmp_path):
    assert not [name for name in parse(page(used)) if "offload" in name or "external" in name or "hit_tokens" in name]
    for flags, tiers in ((TIERS, ["host"]), ((*TIERS, "--kv-offload-dir", tmp_path / "kv", "--kv-offload-disk", "16M"), ["host", "disk"])):
        d = daemons("--device", "sim", *flags)
        prompt = list(range(1000, 1100))
        before = values(d)
        d.complete(prompt, max_tokens=1)
        d.complete(prompt, max_tokens=1)
        d.idle()
        v = values(d)
        for name in ("size_bytes", "used_bytes", "evictions_total"):
            assert [k for k in v if f"kv_offload_{name}" in k] == [f"paged_kv_offload_{name}{{tier={t}}}" for t in tiers]
        for name in ("bytes_total", "seconds_total", "failures_total", "queued_blocks"):
            assert [k for k in v if f"kv_offload_{name}" in k] == [f"paged_kv_offload_{name}{{direction={way},tier={t}}}"
                                                                   for t in tiers for way in ("store", "load")]
        hits = {k[len("paged_kv_hit_tokens_total"):]: v[k] - before[k] for k in v if k.startswith("paged_kv_hit_tokens_total")}
        assert hits == {"{tier=device}": 96, **{f"{{tier={t}}}": 0 for t in tiers}}
        assert v["vllm:external_prefix_cache_hits_total"] == v["paged_external_prefix_cache_hits_total"] == 0
        assert v["paged_prompt_tokens_by_source_total{source=external}"] == 0
        text = page(d)
        assert shutil.which("promtool") is None or not [f for f in promtool(text)[1] if "vllm:" not in f]


def dashboard_expressions():
    board = json.loads((ROOT / "config" / "grafana-dashboard.json").read_text())
    panels = [p for panel in board["panels"] for p in [panel, *panel.get("panels", [])]]
    exprs = [(p["title"], t["expr"]) for p in panels for t in p.get("targets", [])]
    variables = [("variable", v["query"]["query"] if isinstance(v["query"], dict) else v["query"])
                 for v in board["templating"]["list"] if v["type"] == "query"]
    return board, panels, exprs + variables


TIERS = ("--kv-offload-memory", "16M")


def test_dashboard_uses_only_series_that_exist(used, daemons):
    board, panels, expressions = dashboard_expressions()
    with_tiers = daemons("--device", "sim", *TIERS)
    with_tiers.complete("a", max_tokens=1)
    series = {**flatten(parse(page(used))), **flatten(parse(page(with_tiers)))}
    names = {name for name, _ in series}
    labels = {label for _, pairs in series for label, _ in pairs}
    words = {"group_left", "sum", "by", "rate", "increase", "histogram_quantile", "label_values", "max", "clamp_min", "and", "or", "on", "without", "time", "avg",
             "changes", "topk"}
    assert len(expressions) > 20
    for title, expr in expressions:
        bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\$\w+', " ", expr)
        used_names = set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_:]*", bare)) - words - labels - {"instance", "job"}
        assert used_names and used_names <= names, f"{title}: {expr}: {used_names - names}"
        assert bare.count("(") == bare.count(")")
    ids = [p["id"] for p in panels]
    assert len(ids) == len(set(ids)) and board["uid"] and board["title"]
    for p in panels:
        if p["type"] != "row":
            assert p["targets"] and p["description"] and p["fieldConfig"]["defaults"]["unit"], p["title"]
    boxes = [(p["gridPos"]["x"], p["gridPos"]["y"], p["gridPos"]["w"], p["gridPos"]["h"]) for p in panels]
    for i, (x, y, w, h) in enumerate(boxes):
        assert x + w <= 24
        for X, Y, W, H in boxes[:i]:
            assert x + w <= X or X + W <= x or y + h <= Y or Y + H <= y, "panels overlap"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_dashboard_expressions_parse(tmp_path):
    rules = [{"record": f"panel:{i}", "expr": e.replace("$__rate_interval", "5m").replace("$__range", "1h")}
             for i, (_, e) in enumerate(dashboard_expressions()[2]) if not e.startswith("label_values")]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
