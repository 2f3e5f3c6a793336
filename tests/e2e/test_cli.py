"""What users get wrong on the command line: one line that says so, the right exit status, at once."""
import json
import os
import socket
import subprocess
import time

import pytest
from conftest import PAGED, SLOW, TINY

USAGE, MODEL, SYSTEM = 64, 66, 71


def paged(*args, env=None, stdin=b"", timeout=30, within=3):
    """(exit status, stdout, stderr) of one command, told within so many seconds; {tiny} stands for the bundled model."""
    words = [str(PAGED)] + [str(a).replace("{tiny}", str(TINY)) for a in args]
    start = time.monotonic()
    done = subprocess.run(words, input=stdin, capture_output=True, env={**os.environ, **(env or {})}, timeout=timeout * SLOW)
    assert time.monotonic() - start < within * SLOW, "too slow to be told"
    err = done.stderr.decode(errors="replace")
    assert "Sanitizer" not in err and "runtime error" not in err, err
    return done.returncode, done.stdout.decode(errors="replace"), err


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    d = tmp_path_factory.mktemp("files")
    (d / "empty").mkdir()
    (d / "empty.gguf").write_bytes(b"")
    (d / "cut.gguf").write_bytes(TINY.read_bytes()[:5000])
    (d / "text.gguf").write_text("hello\n")
    (d / "unknown").mkdir()
    (d / "unknown" / "config.json").write_text('{"architectures":["FooForCausalLM"],"model_type":"foo"}')
    (d / "range").mkdir()
    (d / "range" / "config.json").write_text('{"architectures":["LlamaForCausalLM"],"num_hidden_layers":-1}')
    (d / "range" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (d / "conf").write_text("[server]\nprot = 1\nport = 90\n")
    (d / "noexec").write_text("#!/bin/sh\n")
    return d


SERVE = ("serve", "--port", "0", "--model", "{tiny}")
RUN = ("run", "--model", "{tiny}", "-n", "2", "-p", "hi")


@pytest.mark.parametrize("args,status,told", [
    ((), USAGE, "usage: paged"),
    (("sevre",), USAGE, "unknown command sevre"),
    (("serve", "--port", "0"), USAGE, "no model: give --model"),
    (("serve", "--model"), USAGE, "--model expects a value"),
    (("serve", "--modle", "x"), USAGE, "unknown option modle (did you mean model?)"),
    (("serve", "a", "b"), USAGE, "unexpected a"),
    ((*SERVE, "--port", "x"), USAGE, 'port: expected an integer, got "x"'),
    ((*SERVE, "--port", "70000"), USAGE, "port: expected 0 to 65535"),
    ((*SERVE, "--tensor-parallel-size", "2"), USAGE, "tensor_parallel_size is not built"),
    ((*SERVE, "--device", "cuda"), USAGE, "device: expected one of"),
    ((*SERVE, "--host", "nowhere.invalid"), USAGE, "host: expected an IPv4 or IPv6 address"),
    ((*SERVE, "--host", "192.0.2.1"), SYSTEM, "cannot listen on 192.0.2.1"),
    ((*SERVE, "--uds", "/nowhere/s"), SYSTEM, "cannot listen on unix socket /nowhere/s"),
    ((*SERVE, "--config", "/nowhere"), USAGE, "cannot open /nowhere"),
    ((*SERVE, "--config", "{files}/conf"), USAGE, "conf:2: unknown option prot"),
    ((*SERVE, "--runtime-dir", "/tmp/" + "x" * 120), USAGE, "runtime_dir: expected a path of at most"),
    ((*SERVE, "--worker-path", "{files}/nothing"), USAGE, "nothing: No such file or directory; set worker_path"),
    ((*SERVE, "--worker-path", "{files}/noexec"), USAGE, "noexec: Permission denied; set worker_path"),
    ((*SERVE, "--worker-path", "{files}"), USAGE, "Permission denied; set worker_path"),
    (("serve", "--port", "0", "--model", "{files}/nothing"), MODEL, "cannot open"),
    (("serve", "--port", "0", "--model", "{files}/empty"), MODEL, "expected a model directory with config.json"),
    (("serve", "--port", "0", "--model", "{files}/empty.gguf"), MODEL, "got an empty file"),
    (("serve", "--port", "0", "--model", "{files}/cut.gguf"), MODEL, "cut.gguf"),
    (("serve", "--port", "0", "--model", "{files}/text.gguf"), MODEL, "expected a GGUF file"),
    (("serve", "--port", "0", "--model", "{files}/unknown"), MODEL, "unknown"),
    (("serve", "--port", "0", "--model", "{files}/range"), MODEL, "num_hidden_layers: expected 0 to 2147483647, got -1"),
    (("serve", "--port", "0", "--model", "/dev/zero"), SYSTEM, "expected a regular file"),
    ((*RUN, "--max-model-len", "1"), USAGE, "max_model_len: expected at least 2"),
    ((*RUN, "--num-kv-blocks", "1"), USAGE, "num_kv_blocks: expected 0 or at least 2"),
    ((*RUN, "--num-kv-blocks", "9", "--kv-cache-memory", "1M"), USAGE, "give one of them"),
    ((*RUN, "--kv-cache-memory", "5X"), USAGE, "kv_cache_memory: expected a size"),
    ((*RUN, "--kv-cache-memory", "1K"), USAGE, "kv_cache_memory: expected at least"),
    ((*RUN, "--kv-cache-memory", "60T"), SYSTEM, "lower --kv-cache-memory"),
    ((*RUN, "--block-size", "24"), USAGE, "block_size: expected a multiple of 16"),
    ((*RUN, "--kv-cache-dtype", "q8"), USAGE, "kv_cache_dtype: expected one of"),
    ((*RUN, "--threads", "5000"), USAGE, "threads: expected 0 to 1024"),
    (("run", "--model", "{tiny}", "-p"), USAGE, "-p expects a value"),
    (("run", "--model", "{tiny}", "hi"), USAGE, "the prompt goes behind -p"),
    (("run", "--model", "{tiny}"), USAGE, "the prompt has 0 tokens"),
    (("run", "--model", "{tiny}", "-p", "word " * 5000), USAGE, "the prompt has more than 2048 tokens; expected 1 to 1023"),
    ((*RUN, "-n", "0"), USAGE, "n: expected 1 to"),
    ((*RUN, "--temperature", "nan"), USAGE, "temperature: expected 0 to 2"),
    ((*RUN, "--seed", "9" * 30), USAGE, "seed: expected"),
    (("bench",), USAGE, "usage: paged bench"),
    (("bench", "latency", "--model", "{tiny}", "--input-len"), USAGE, "--input-len expects a value"),
    (("bench", "latency", "--model", "{tiny}", "--input-len", "100000"), USAGE, "this model holds 1024"),
    (("bench", "throughput", "--model", "{tiny}", "--max-model-len", "512", "--num-kv-blocks", "3", "--input-len", "100", "--output-len",
      "5", "--num-prompts", "4"), 70, "a request failed: prompt and max_tokens together need more KV-cache blocks"),
    (("bench", "sched", "--running"), USAGE, "--running expects a value"),
    (("bench", "sched", "--running", "0"), USAGE, "--running: expected whole numbers with commas between them, of 1 to 65536, got 0"),
    (("bench", "sched", "--hit-rate", "0,1.5"), USAGE, "--hit-rate: expected numbers"),
    (("bench", "sched", "--steps", "1,2"), USAGE, "--steps: expected whole numbers, one, of 1 to 4096, got 1,2"),
    (("bench", "sched", "--model", "x"), USAGE, "unexpected --model"),
    (("inspect",), USAGE, "usage: paged inspect"),
    (("config", "--dump", "--port", "x"), USAGE, "port: expected an integer"),
    (("config", "what"), USAGE, "unexpected what"),
])
def test_mistakes_are_told(files, args, status, told):
    got, _, err = paged(*(str(a).replace("{files}", str(files)) for a in args))
    assert (got, told in err) == (status, True), err


@pytest.mark.parametrize("name,told", [("nothing", "cannot open"), ("empty", "config.json"), ("empty.gguf", "empty file"),
                                       ("cut.gguf", "cut.gguf"), ("text.gguf", "expected a GGUF file")])
def test_inspect_tells_what_is_wrong(files, name, told):
    status, out, _ = paged("inspect", files / name)
    assert status == 1 and told in out and "this build can run it: no" in out


@pytest.mark.parametrize("flags", [("--block-size", "32"), ("--block-size", "256"), ("--kv-cache-dtype", "f32"), ("--kv-cache-dtype", "bf16"),
                                   ("--num-kv-blocks", "2"), ("--threads", "64"), ("--max-num-batched-tokens", "1"),
                                   ("--max-num-seqs", "65536"), ("--max-queued-requests", "1000000"), ("--max-model-len", "5000")])
def test_unusual_sizes_work(flags):
    status, out, err = paged("run", "--model", "{tiny}", "-p", "And God said", "-n", "3", "--temperature", "0", *flags)
    assert status == 0 and len(out) > 2, err


def test_run_says_only_the_text():
    status, out, err = paged("run", "--model", "{tiny}", "-n", "4", "--temperature", "0", stdin=b"And God said")
    assert status == 0 and out
    assert [line for line in err.splitlines() if line and not line.startswith("[")] == []


def test_bench_json_is_json(tmp_path):
    status, out, err = paged("bench", "throughput", "--model", "{tiny}", "--served-model-name", 'a"b\\c', "--num-prompts", "2",
                             "--iterations", "1", "--input-len", "9", "--output-len", "3", "--json")
    assert status == 0 and json.loads(out)["model"] == 'a"b\\c', err


def test_bench_offload_compares_tiers(tmp_path):
    flags = ("bench", "offload", "--model", "{tiny}", "--device", "sim", "--sim-step-us", "200", "--sim-token-us", "100", "--conversations", "12",
             "--concurrency", "1", "--pool-share", "10", "--prefix-len", "200", "--turn-len", "9", "--output-len", "5", "--pairs", "2", "--json")
    disk = ("--kv-offload-memory", "2M", "--kv-offload-dir", str(tmp_path), "--kv-offload-disk", "100M")
    (tmp_path / "other").write_text("left alone")
    status, out, err = paged(*flags, *disk, within=60)
    assert status == 0, err
    report = json.loads(out)
    assert [row["tier"] for row in report["tiers"]] == ["none", "host", "disk"]
    none, host, disk = report["tiers"]
    assert report["all_tokens"] == 12 * (200 + 2 * 14 + 5) and report["all_tokens"] / report["pool_tokens"] > 9
    assert none["ttft_ratio"] == none["throughput_ratio"] == 1 and none["hit_share"] == {"device": 0, "host": 0, "disk": 0}
    assert host["hit_share"]["host"] > 0.8 and host["hit_share"]["device"] == 0 and host["ttft_ratio"] < 0.5 and host["throughput_ratio"] > 1.2
    assert disk["hit_share"]["disk"] > 0.3 and disk["ttft_ratio"] < 1
    assert report["no_hits"]["pairs"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    status, _, err = paged(*flags, "--concurrency", "2")
    assert status == USAGE and "expected at least" in err and "--concurrency" in err


def test_bench_sched_prints_one_array():
    status, out, err = paged("bench", "sched", "--running", "40", "--pool-blocks", "0,20000", "--groups", "1,3", "--hit-rate", "0,1",
                             "--steps", "4", "--json", within=30)
    assert status == 0, err
    rows = json.loads(out)
    keys = {"running", "pool_blocks", "groups", "hit_rate", "ns_per_request_step", "us_per_step", "allocations_per_step"}
    assert all(keys <= set(row) for row in rows)
    assert {(r["running"], r["pool_blocks"] == 20000, r["groups"], r["hit_rate"]) for r in rows} == {
        (40, is_large, g, rate) for is_large in (False, True) for g in (1, 3) for rate in (0, 1)} and len(rows) == 8
    for row in rows:
        assert row["us_per_step"] > 0 and row["admission_us"] > 0
        assert row["ns_per_request_step"] == pytest.approx(row["us_per_step"] * 1e3 / row["running"], rel=0.01)
        assert row["allocations_per_step"] == 0
        assert row["measured_hit_rate"] == pytest.approx(row["hit_rate"], abs=0.07)


def test_environment_is_checked_too():
    status, _, err = paged("config", env={"PAGED_PORT": "x"})
    assert status == USAGE and "environment PAGED_PORT" in err


def test_unix_socket_path_of_others_is_left_alone(daemons, tmp_path):
    path, precious = tmp_path / "s", tmp_path / "precious"
    precious.write_text("data")
    d = daemons("--uds", path, wait=False)
    d.wait_log("ready model=")
    status, _, err = paged(*SERVE, "--uds", path)
    assert status == SYSTEM and "another process listens" in err
    status, _, err = paged(*SERVE, "--uds", precious)
    assert status == SYSTEM and "is not a socket" in err
    assert precious.read_text() == "data"
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
    d.process.kill()
    d.process.wait()
    d.log_file.close()
    assert path.exists()  # a killed daemon leaves it; the next one takes it over
    daemons("--uds", path, wait=False).wait_log("ready model=")


def test_closed_standard_files(tmp_path):
    p = subprocess.Popen(["sh", "-c", f"exec '{PAGED}' serve --port 0 --runtime-dir '{tmp_path}/run' --model '{TINY}' <&- >&- 2>&-"])
    time.sleep(1 * SLOW)
    try:
        assert [os.readlink(f"/proc/{p.pid}/fd/{fd}") for fd in (0, 1, 2)] == ["/dev/null"] * 3
    finally:
        p.terminate()
    assert p.wait(10 * SLOW) == 0
