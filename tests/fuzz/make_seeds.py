#!/usr/bin/env python3
"""Writes a few hand-made inputs per fuzz target into DIR/<target>/, for `scripts/fuzz --minimise` to start from.

    tests/fuzz/make_seeds.py DIR
"""
import json
import pathlib
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIR = pathlib.Path(sys.argv[1])


def put(target, name, data):
    path = DIR / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else bytes(data))


# --- GGUF ---------------------------------------------------------------------------------------------------

U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5


def gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value):
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + gguf_string(value)
    kind = STRING if isinstance(value[0], str) else F32 if isinstance(value[0], float) else I32
    out = struct.pack("<IIQ", ARRAY, kind, len(value))
    for v in value:
        out += gguf_string(v) if kind == STRING else struct.pack("<f" if kind == F32 else "<i", v)
    return out


def gguf(meta, tensors):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    for key, value in meta.items():
        out += gguf_string(key) + gguf_value(value)
    offset = 0
    for name, dims in tensors.items():
        n_bytes = 4
        for d in dims:
            n_bytes *= d
        out += gguf_string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        out += struct.pack("<IQ", 0, offset)
        offset += (n_bytes + 31) // 32 * 32
    return out + bytes(-len(out) % 32) + bytes(offset)


def gguf_model(arch, dim=8, vocab=12):
    meta = {"general.architecture": arch, "general.alignment": 32, f"{arch}.block_count": 1, f"{arch}.context_length": 64,
            f"{arch}.embedding_length": dim, f"{arch}.feed_forward_length": dim, f"{arch}.attention.head_count": 2,
            f"{arch}.attention.head_count_kv": 1, f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.dimension_count": dim // 2, f"{arch}.rope.freq_base": 10000.0, f"{arch}.vocab_size": vocab,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [f"t{i}" for i in range(vocab)], "tokenizer.ggml.token_type": [1] * (vocab - 1) + [3],
            "tokenizer.ggml.merges": ["t 0", "t 1"], "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False}
    layer = {"attn_norm": [dim], "attn_q": [dim, dim], "attn_k": [dim, dim // 2], "attn_v": [dim, dim // 2], "attn_output": [dim, dim],
             "ffn_norm": [dim], "ffn_gate": [dim, dim], "ffn_up": [dim, dim], "ffn_down": [dim, dim]}
    if arch == "qwen2":
        layer.update({"attn_q": [dim, dim]})
    tensors = {"token_embd.weight": [dim, vocab], "output_norm.weight": [dim], "output.weight": [dim, vocab],
               **{f"blk.0.{name}.weight": dims for name, dims in layer.items()}}
    if arch == "qwen2":
        tensors.update({"blk.0.attn_q.bias": [dim], "blk.0.attn_k.bias": [dim // 2], "blk.0.attn_v.bias": [dim // 2]})
    if arch == "qwen3":
        tensors.update({"blk.0.attn_q_norm.weight": [dim // 2], "blk.0.attn_k_norm.weight": [dim // 2]})
    return gguf(meta, tensors)


for arch in ("llama", "qwen2", "qwen3", "smollm3", "mistral3", "other"):
    put("gguf", arch, gguf_model(arch))
put("gguf", "empty", gguf({}, {}))

# --- safetensors --------------------------------------------------------------------------------------------


def safetensors(tensors, metadata=None, pad=0):
    header, offset = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, n_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + bytes(offset)


put("safetensors", "empty", safetensors({}))
put("safetensors", "kinds", safetensors({"model.layers.0.self_attn.q_proj.weight": ("F32", [2, 3], 24), "lm_head.weight": ("BF16", [4], 8),
                                         "model.norm.weight": ("F16", [0], 0), "x": ("I64", [], 8), "y": ("F8_E4M3", [2], 2)},
                                        {"format": "pt"}, 6))

# --- tokenizer.json and text --------------------------------------------------------------------------------

BPE = {"version": "1.0", "added_tokens": [{"id": 5, "content": "<s>", "special": True, "lstrip": True, "rstrip": False, "normalized": False,
                                           "single_word": False}],
       "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"},
                                                          {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
       "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                               {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]},
       "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                          "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}},
       "decoder": {"type": "ByteLevel"},
       "model": {"type": "BPE", "byte_fallback": False, "ignore_merges": False, "unk_token": None,
                 "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4}, "merges": ["a b", ["ab", "c"]]}}
SPM = {"added_tokens": [], "normalizer": {"type": "Prepend", "prepend": "▁"}, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"},
       "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                                                    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
       "model": {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>",
                 "vocab": {"<unk>": 0, "<0x61>": 1, "▁": 2, "a": 3, "▁a": 4}, "merges": ["▁ a"]}}
put("tokenizer", "bpe", json.dumps(BPE))
put("tokenizer", "spm", json.dumps(SPM, ensure_ascii=False))
for name in ("mistral-first", "llama3", "qwen2", "smollm", "added"):
    tree = json.loads((ROOT / "tests/data/tokenizers" / name / "tokenizer.json").read_text())
    vocab = sorted(tree["model"]["vocab"].items(), key=lambda item: item[1])[:40]
    tree["model"]["vocab"] = dict(vocab)
    tree["model"]["merges"] = []
    tree["added_tokens"] = tree["added_tokens"][:3]
    put("tokenizer", name, json.dumps(tree, ensure_ascii=False))

TEXTS = ["Hello, world! It's 12345 o'clock.\n\n  indented\ttext \r\n", "naïve café Ünïcödé 你好世界 🙂👍🏽 ﬁ Å", "<s>[INST] x [/INST]</s><|im_start|>",
         "   leading and trailing   ", "\0\x01\x7f", "a" * 200, "e\u0301\u0327 \uac00\u1100\u1161"]
for i in range(24):
    put("tokenizer_text", f"text-{i}", bytes([i * 8 % 256 + i % 8]) + TEXTS[i % len(TEXTS)].encode() + (b"\xff\xc3\xed\xa0\x80" if i % 5 == 0 else b""))

# --- configuration ------------------------------------------------------------------------------------------

conf = (ROOT / "config/paged.conf").read_text()
lines = [line for line in conf.splitlines() if line and not line.startswith("#")]
put("config", "all", "\n".join(lines) + "\n")
section = ""
for line in lines:
    if line.startswith("["):
        section = line
    else:
        put("config", line.split()[0], f"{section}\n{line}\n")
put("config", "sizes", "\ufeff[server]\r\nmax_body_bytes = 1.5M\n; comment\nmax_header_bytes=8k\n[cache]\nkv_cache_memory = 3GiB\n")

# --- completion bodies, HTTP --------------------------------------------------------------------------------

BODIES = [{"prompt": "a", "max_tokens": 5}, {"prompt": ["a", "b"], "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3},
          {"prompt": [1, 2, 3], "logprobs": 2, "stop": ["x", "\u00e9"], "stop_token_ids": [4]},
          {"prompt": [[1], [2, 3]], "logit_bias": {"5": -100}, "stream": True, "stream_options": {"include_usage": True}},
          {"prompt": "\u0000\ud83d\ude42", "presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.1, "min_p": 0.1, "top_k": -1},
          {"model": "m", "prompt": "a", "echo": False, "suffix": None, "best_of": 1, "user": "u", "cache_salt": "s", "priority": 1},
          {"prompt": "a", "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
           "return_token_ids": True, "unknown": {"x": []}}]
for i, body in enumerate(BODIES):
    put("completion_params", f"body-{i}", bytes([i % 8]) + json.dumps(body).encode())
    body.pop("model", None)
    for stream in (False, True):
        put("completions", f"body-{i}-{stream}", bytes([0, 0, 0, 24]) + bytes(range(1, 25)) + json.dumps({**body, "stream": stream}).encode())
put("completions", "echo", bytes([0, 0, 0, 0]) + b'{"prompt": "abc d", "echo": true, "logprobs": 2, "max_tokens": 4, "stream": true}')
put("completions", "best_of", bytes([0, 0, 0, 0]) + b'{"prompt": "a", "n": 2, "best_of": 3, "temperature": 1, "max_tokens": 2}')
put("completions", "errors", bytes([96, 0, 0, 4, 254, 1, 253, 0]) + b'{"prompt": ["a", "b", "c"], "max_tokens": 4}')
put("completions", "tokenize", bytes([0, 0, 2, 0]) + b'{"prompt": "some text", "add_special_tokens": false, "return_token_strs": true}')
put("completions", "detokenize", bytes([0, 0, 3, 0]) + b'{"tokens": [1, 2, 300]}')
for route in range(4, 10):
    put("completions", f"route-{route}", bytes([route % 8, 0, route, 0]))

REQUESTS = {
    "get": ([0, 0] + [0] * 8, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"),
    "pipelined": ([0, 0, 0, 3, 5, 68, 7, 1, 2, 6], b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 8),
    "post": ([7, 0] + [0, 68, 68, 3] * 2, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello" * 2),
    "chunked": ([20, 0] + [0] * 8, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n"),
    "expect": ([0, 0] + [0] * 8, b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"),
    "http10": ([0, 0] + [197] * 8, b"HEAD /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n"),
    "late": ([0, 4] + [3] * 8, b"GET /health HTTP/1.1\r\nHost"),
    "drain": ([0, 8] + [0] * 8, b"OPTIONS * HTTP/1.1\r\nA: b\r\n\r\nGET http://h/p?q HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "large": ([0, 0] + [247] * 8, b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n"),
}
for name, (head, data) in REQUESTS.items():
    put("http", name, bytes(head) + data)

# --- messages -----------------------------------------------------------------------------------------------

for kind in range(1, 17):
    put("wire", f"type-{kind}", struct.pack("<IHHIIQ", 0x57444750, 1, kind, 1, 0, 24) + bytes(200))
new = bytes([0, 0, 7, 0, 1])  # a step of one request; what it is made of is in fuzz_worker.c
put("worker", "sim", bytes([1, 0, 0, 0, 0, 0]) + (new + bytes(4)) * 4 + bytes([254]))
put("worker", "model", bytes([0, 0, 0, 0, 0, 0]) + (new + bytes(4)) * 4 + bytes([254]))
ready = bytes([0, 160, 0, 0, 0, 0, 0, 0, 0, 0, 3])  # challenge, hello, load_done, kv_ready
put("worker_life", "one", ready + bytes([200, 5, 3, 160, 160, 0, 0, 7, 160, 0, 0, 9, 160, 0, 0, 250]))
put("worker_life", "three", ready + bytes([200, 5, 3, 200, 38, 20, 200, 138, 20]) + bytes([160, 0, 0, 7, 8, 9]) * 8 + bytes([232, 160, 160]))

# --- what servers send to our clients: first byte, then a stream of events, a metrics page or an address ----------

EVENT = {"id": "cmpl-1", "choices": [{"index": 0, "text": "a\u00e9\"", "logprobs": None, "finish_reason": None, "token_ids": [5, 6]}], "usage": None}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}}
CHAT = {"choices": [{"delta": {"content": "x", "reasoning_content": ""}, "finish_reason": "stop"}]}
put("client", "stream", "\x07" + "".join(f"data: {json.dumps(e)}\n\n" for e in (EVENT, USAGE, CHAT)) + "data: [DONE]\n\n")
put("client", "lines", "\x03: comment\r\nevent: x\r\ndata: {\r\ndata:}\r\n\r\ndata\n\nid: 1\n")
put("client", "error", "\x01data: " + json.dumps({"error": {"message": "no", "code": 429}}) + "\n\n")
put("client", "metrics", '\x05# HELP a A.\n# TYPE a counter\na{b="c\\n\\"",le="+Inf"} 1.5e3 1395066363000\nx:y NaN\nz 1 # {t="1"} 2\n')
for i, url in enumerate(["http://127.0.0.1:8000/v1/", "unix:/run/s", "[::1]:80", "https://x", "localhost:99/a/v1"]):
    put("client", f"url{i}", "\x01" + url)

# --- dictionaries are committed: words of each format, taken from the sources -------------------------------


def words(*files):
    found = set()
    for file in files:
        found |= set(re.findall(r'"([A-Za-z_.<|>][A-Za-z0-9_.<|> -]{1,40})"', (ROOT / file).read_text()))
    return sorted(w for w in found if "%" not in w and not w.endswith(".h") and " " not in w)


DICTS = {
    "config": ["config/config_table.c"],
    "completion_params": ["engine/http/completion_params.c"],
    "completions": ["engine/http/completion_params.c", "engine/http/api_tokenize.c"],
    "gguf": ["common/model/gguf.c", "common/model/model_config_gguf.c", "common/model/model_file.c", "common/model/model_layout.c"],
    "safetensors": ["common/model/safetensors.c", "common/model/model_hf_names.c", "common/model/dtype.c"],
    "tokenizer": ["engine/text/tokenizer_json.c", "engine/text/tokenizer_json_parts.c"],
}
HTTP_WORDS = ["GET ", "HEAD ", "POST ", "OPTIONS ", " HTTP/1.1\\x0d\\x0a", " HTTP/1.0\\x0d\\x0a", "\\x0d\\x0a\\x0d\\x0a", "Content-Length: ",
              "Transfer-Encoding: chunked\\x0d\\x0a", "Expect: 100-continue\\x0d\\x0a", "Connection: close\\x0d\\x0a", "Connection: keep-alive\\x0d\\x0a",
              "Host: a\\x0d\\x0a", "http://", "0\\x0d\\x0a\\x0d\\x0a", "Upgrade: h2c\\x0d\\x0a"]
out = ROOT / "tests/fuzz/dict"
out.mkdir(exist_ok=True)
for target, files in DICTS.items():
    (out / f"{target}.dict").write_text("".join(f'"{w}"\n' for w in words(*files)))
(out / "http.dict").write_text("".join(f'"{w}"\n' for w in HTTP_WORDS))

# --- files of the disk tier: a name, a header, changes to a right one ----------------------------------------

put("disk_block", "name", b"\0" + b"0102030405060708-" + b"0123456789abcdef" * 4 + b"-00000003")
put("disk_block", "header", b"\x40PAGEDKVB" + struct.pack("<IIQ", 1, 1, 4000) + bytes([1, 2, 3]))
put("disk_block", "same", b"\x80")
put("disk_block", "changed", b"\x81" + bytes([8, 0, 1]))

# --- batches of KV events ---------------------------------------------------------------------------------------


def msgpack(value):
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        if value < 0:
            return b"\xd3" + struct.pack(">q", value)
        heads = [(128, b"", "B"), (1 << 8, b"\xcc", "B"), (1 << 16, b"\xcd", "H"), (1 << 32, b"\xce", "I"), (1 << 64, b"\xcf", "Q")]
        head, form = next((head, form) for limit, head, form in heads if value < limit)
        return head + struct.pack(">" + form, value)
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xa0 + len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    if isinstance(value, dict):
        return bytes([0x80 + len(value)]) + b"".join(msgpack(k) + msgpack(v) for k, v in value.items())
    head = bytes([0x90 + len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
    return head + b"".join(map(msgpack, value))


STORED = ["BlockStored", [1, 200, 60000, 1 << 31, (1 << 64) - 1], 77, [3] * 20, 4, None, "GPU", None, [None, ["salt"]], 0, "sliding_window", 4096]
REMOVED = ["BlockRemoved", [5, 6], "DISK", 1]
for name, events in {"all": [STORED, REMOVED, ["AllBlocksCleared"]], "short": [["BlockStored", [1], None], ["BlockRemoved", []]], "none": [],
                     "unknown": [["Other", 1, -5, 2.5, True, b"x", {"a": [1, [2, [3]]]}], STORED + ["more", {}]],
                     "texts": [["BlockRemoved", [1], "\x1b[2J\n\u00e9\"\\", 1], ["BlockStored", [], None, [], 1, None, "x" * 40]]}.items():
    put("kv_events", name, msgpack([1700000000.25, events, 0]))
put("kv_events", "times", msgpack([float("nan"), [REMOVED], 0]))
put("kv_events", "wide", b"\xdd" + struct.pack(">I", 3) + msgpack(-1e300) + b"\xdd" + struct.pack(">I", 1) + msgpack(REMOVED) + b"\xd0\xff\xca\0\0\0\0")
