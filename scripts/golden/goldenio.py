"""Paths and binary formats of the golden data; tests/golden/README.md specifies them."""

import os
import struct
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MODELS = ROOT / "tests" / "data" / "models"
TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged"

SMOLLM2 = CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MAX_FILE = 1_000_000
NO_SOURCE = 0xFFFFFFFF


def sha256(path):
    import hashlib

    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def u32(values):
    return np.asarray(values, dtype="<u4").tobytes()


def f32(values):
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def save(path, data):
    """Write data to path, whole or not at all."""
    path = Path(path)
    if len(data) >= MAX_FILE:
        raise SystemExit(f"{path}: {len(data)} bytes, expected fewer than {MAX_FILE}")
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_bytes(data)
    tmp.replace(path)
    print(f"{path.relative_to(ROOT)}: {len(data)} bytes")


class Reader:
    def __init__(self, path, magic):
        self.path, self.data, self.at = path, Path(path).read_bytes(), 0
        if self.take(8) != magic:
            raise SystemExit(f"{path}: expected magic {magic!r}")

    def take(self, n):
        if self.at + n > len(self.data):
            raise SystemExit(f"{self.path}: truncated at {self.at}")
        self.at += n
        return self.data[self.at - n : self.at]

    def u32(self, n=None):
        a = np.frombuffer(self.take(4 * (1 if n is None else n)), "<u4")
        return int(a[0]) if n is None else a

    def f32(self, n=None):
        a = np.frombuffer(self.take(4 * (1 if n is None else n)), "<f4")
        return float(a[0]) if n is None else a

    def end(self):
        if self.at != len(self.data):
            raise SystemExit(f"{self.path}: {len(self.data) - self.at} bytes too many")


# --- logits -------------------------------------------------------------------------------------


def write_logits(path, vocab_size, cases):
    """cases: dicts with prompt, positions, greedy, margin (lists) and logits (positions x vocab)."""
    out = [b"PGLOGIT1", u32([len(cases), vocab_size])]
    for c in cases:
        logits = np.asarray(c["logits"], np.float32)
        assert logits.shape == (len(c["positions"]), vocab_size) and np.isfinite(logits).all()
        assert c["positions"][-1] == len(c["prompt"]) - 1 and len(c["margin"]) == len(c["greedy"])
        out += [
            u32([len(c["prompt"]), len(c["positions"]), len(c["greedy"])]),
            f32([logits.max() - logits.min()]),
            u32(c["prompt"]),
            u32(c["positions"]),
            u32(c["greedy"]),
            f32(c["margin"]),
            f32(logits),
        ]
    save(path, b"".join(out))


def read_logits(path):
    r = Reader(path, b"PGLOGIT1")
    n, vocab = r.u32(), r.u32()
    cases = []
    for _ in range(n):
        np_, nq, ng = r.u32(), r.u32(), r.u32()
        c = {"range": r.f32(), "prompt": r.u32(np_), "positions": r.u32(nq), "greedy": r.u32(ng), "margin": r.f32(ng)}
        c["logits"] = r.f32(nq * vocab).reshape(nq, vocab)
        cases.append(c)
    r.end()
    return vocab, cases


# --- encoder-decoder logits ---------------------------------------------------------------------


def write_encdec(path, vocab_size, cases):
    """cases: dicts as write_logits takes them (prompt: the decoder's) with encoder, a list."""
    out = [b"PGENCDE1", u32([len(cases), vocab_size])]
    for c in cases:
        logits = np.asarray(c["logits"], np.float32)
        assert logits.shape == (len(c["positions"]), vocab_size) and np.isfinite(logits).all()
        assert c["positions"][-1] == len(c["prompt"]) - 1 and len(c["margin"]) == len(c["greedy"])
        out += [
            u32([len(c["encoder"]), len(c["prompt"]), len(c["positions"]), len(c["greedy"])]),
            f32([logits.max() - logits.min()]),
            u32(c["encoder"]),
            u32(c["prompt"]),
            u32(c["positions"]),
            u32(c["greedy"]),
            f32(c["margin"]),
            f32(logits),
        ]
    save(path, b"".join(out))


def read_encdec(path):
    r = Reader(path, b"PGENCDE1")
    n, vocab = r.u32(), r.u32()
    cases = []
    for _ in range(n):
        ne, np_, nq, ng = r.u32(), r.u32(), r.u32(), r.u32()
        c = {"range": r.f32(), "encoder": r.u32(ne), "prompt": r.u32(np_), "positions": r.u32(nq)}
        c |= {"greedy": r.u32(ng), "margin": r.f32(ng), "logits": r.f32(nq * vocab).reshape(nq, vocab)}
        cases.append(c)
    r.end()
    return vocab, cases


# --- dequantisation -----------------------------------------------------------------------------


def write_dequant(path, ggml_type, block_elems, block_bytes, blocks, expected):
    n = len(blocks) // block_bytes
    assert len(blocks) == n * block_bytes and expected.shape == (n * block_elems,) and expected.dtype == np.float32
    pad = b"\0" * (-len(blocks) % 4)
    save(path, b"PGDEQNT1" + u32([ggml_type, block_elems, block_bytes, n]) + blocks + pad + f32(expected))


def read_dequant(path):
    r = Reader(path, b"PGDEQNT1")
    ggml_type, elems, size, n = r.u32(), r.u32(), r.u32(), r.u32()
    blocks = r.take(n * size)
    r.take(-(n * size) % 4)
    expected = r.f32(n * elems)
    r.end()
    return ggml_type, elems, size, blocks, expected


# --- tokenizers ---------------------------------------------------------------------------------


def offsets(items):
    return np.concatenate([[0], np.cumsum([len(i) for i in items], dtype=np.int64)])


def write_strings(path, strings):
    raw = [s.encode("utf-8") for s in strings]
    off = offsets(raw)
    save(path, b"PGSTRNG1" + u32([len(raw), off[-1]]) + u32(off) + b"".join(raw))


def read_strings(path):
    r = Reader(path, b"PGSTRNG1")
    n, total = r.u32(), r.u32()
    off = r.u32(n + 1)
    data = r.take(total)
    r.end()
    return [data[off[i] : off[i + 1]].decode("utf-8") for i in range(n)]


def write_ids(path, vocab_size, encoded, prefix, suffix):
    off = offsets(encoded)
    size = 2 if vocab_size <= 0x10000 else 4
    flat = np.fromiter((t for ids in encoded for t in ids), dtype="<u2" if size == 2 else "<u4", count=int(off[-1]))
    assert not len(flat) or flat.max() < vocab_size
    head = u32([len(encoded), vocab_size, off[-1], size, len(prefix), len(suffix)])
    save(path, b"PGTOKID1" + head + u32(prefix) + u32(suffix) + u32(off) + flat.tobytes())


def read_ids(path):
    r = Reader(path, b"PGTOKID1")
    n, vocab, total, size, npre, nsuf = (r.u32() for _ in range(6))
    prefix, suffix, off = r.u32(npre), r.u32(nsuf), r.u32(n + 1)
    flat = np.frombuffer(r.take(total * size), "<u2" if size == 2 else "<u4")
    r.end()
    return vocab, [flat[off[i] : off[i + 1]].tolist() for i in range(n)], prefix.tolist(), suffix.tolist()


def write_dec(path, cases):
    """cases: (source, ids, text)."""
    ids = [c[1] for c in cases]
    texts = [c[2].encode("utf-8") for c in cases]
    ioff, toff = offsets(ids), offsets(texts)
    save(
        path,
        b"PGTOKDE1"
        + u32([len(cases), ioff[-1], toff[-1]])
        + u32([c[0] for c in cases])
        + u32(ioff)
        + u32(toff)
        + u32([t for i in ids for t in i])
        + b"".join(texts),
    )


def read_dec(path):
    r = Reader(path, b"PGTOKDE1")
    n, nids, nbytes = r.u32(), r.u32(), r.u32()
    source, ioff, toff, ids = r.u32(n), r.u32(n + 1), r.u32(n + 1), r.u32(nids)
    text = r.take(nbytes)
    r.end()
    return [
        (int(source[i]), ids[ioff[i] : ioff[i + 1]].tolist(), text[toff[i] : toff[i + 1]].decode("utf-8")) for i in range(n)
    ]
