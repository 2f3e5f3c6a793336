"""Reads every golden file back: structure, sizes, what must agree with what. Needs numpy, and gguf for GGUF files."""

import json

import gguf
import numpy as np

from goldenio import GOLDEN, MAX_FILE, MODELS, NO_SOURCE, TOKENIZERS, read_dec, read_dequant, read_encdec, read_ids, read_logits, read_strings, sha256


def main():
    for root in (GOLDEN, MODELS, TOKENIZERS):
        for path in root.rglob("*"):
            assert not path.is_file() or 0 < path.stat().st_size < MAX_FILE, path

    for path in sorted((GOLDEN / "logits").glob("*.bin")):
        vocab, cases = read_logits(path)
        for c in cases:
            assert c["prompt"].max() < vocab and c["greedy"].max() < vocab and (np.diff(c["positions"]) > 0).all()
            assert c["logits"][-1].argmax() == c["greedy"][0]
            assert np.isclose(c["range"], c["logits"].max() - c["logits"].min(), rtol=1e-6)
        shape = ", ".join(f"{len(c['prompt'])} tokens range {c['range']:.1f}" for c in cases)
        print(f"{path.name}: {vocab} tokens; {shape}; smallest margin {min(c['margin'].min() / c['range'] for c in cases):.1e}")

    for path in sorted((GOLDEN / "encdec").glob("*.bin")):
        vocab, cases = read_encdec(path)
        for c in cases:
            assert max(c["encoder"].max(), c["prompt"].max(), c["greedy"].max()) < vocab and (np.diff(c["positions"]) > 0).all()
            assert c["logits"][-1].argmax() == c["greedy"][0]
        texts = json.loads(path.with_suffix(".json").read_text())
        assert all(len(t["ids"]) <= t["max_tokens"] for t in texts)
        print(f"{path.name}: {vocab} tokens; {len(cases)} cases, {len(texts)} texts")

    for path in sorted((GOLDEN / "dequant").glob("*.bin")):
        kind, elems, size, blocks, expected = read_dequant(path)
        kind = gguf.GGMLQuantizationType(kind)
        assert kind.name == path.stem and (elems, size) == gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(blocks, np.uint8).reshape(1, -1)
        got = raw.view("<f2").astype(np.float32) if kind.name == "F16" else gguf.dequantize(raw, kind)
        assert (got.reshape(-1).view("<u4") == expected.view("<u4")).all()
        print(f"{path.name}: {len(blocks) // size} blocks")

    strings = read_strings(GOLDEN / "tokenizer" / "strings.bin")
    assert len(set(strings)) == len(strings) == 5000
    for path in sorted((GOLDEN / "tokenizer").glob("*.ids")):
        vocab, ids, prefix, suffix = read_ids(path)
        assert len(ids) <= len(strings)
        line = f"{path.name}: {vocab} tokens, {sum(map(len, ids))} ids"
        dec = path.with_suffix(".dec")
        if dec.exists():
            cases = read_dec(dec)
            assert all(source == NO_SOURCE or ids[source] == got for source, got, _ in cases)
            line += f", {len(cases)} to decode"
        print(line)

    ppl = json.loads((GOLDEN / "perplexity.json").read_text())
    assert ppl["text_sha256"] == sha256(GOLDEN / "english.txt")
    print(f"perplexity {ppl['perplexity']:.4f} over {ppl['n_scored']} tokens")
    for path in sorted([*MODELS.rglob("*.gguf"), *TOKENIZERS.rglob("*.gguf")]):
        r = gguf.GGUFReader(path)
        print(f"{path.name} in {path.parent.name}: {len(r.tensors)} tensors")


main()
