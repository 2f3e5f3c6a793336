"""Writes tests/golden/tokenizer/ and tests/data/tokenizers/.

  make_tokenizers.py           train the small tokenizers, write everything
  make_tokenizers.py NAME…     only the golden files of these
  make_tokenizers.py -t NAME…  train these first

The vocabularies of Llama 2, Llama 3.1, Qwen3 (scripts/fetch_tokenizers) and SmolLM2 (its GGUF file) are not committed,
only the ids.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models

import corpus
import small_tokenizers as st
from goldenio import CACHE, GOLDEN, MODELS, NO_SOURCE, SMOLLM2, TOKENIZERS, save, write_dec, write_ids, write_strings

N_STRINGS = 5000
N_VOCAB = 1500
FETCHED = ("llama2", "llama3_1", "qwen3")


def smollm2_tokenizer():
    """What SmolLM2's tokenizer.json says, put together from the GGUF file."""
    fields = gguf.GGUFReader(SMOLLM2).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = st.pre_tokenizer("smollm")
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(st.special(*(t for t, k in zip(tokens, kinds) if k == gguf.TokenType.CONTROL)))
    assert tok.get_vocab_size() == len(tokens)
    return tok


# --- the small ones ------------------------------------------------------------------------------


def odd_added_tokens():
    """Every flag that an added token can have."""
    return (
        st.special("<|endoftext|>")
        + st.plain("<mark>", lstrip=True, rstrip=True)
        + st.plain("<left>", lstrip=True)
        + st.plain("<right>", rstrip=True)
        + st.plain("word", "<word>", single_word=True)
        + st.plain("<norm>", "Caf\u00e9", normalized=True)
        + st.plain("  ", "<|", "<|end", "\n\n\n", "\u00e9t\u00e9", "\U0001f469\u200d")
        + [AddedToken("<pad>", special=True, normalized=False, lstrip=True)]
    )


def train():
    """name -> (tokenizer, tokenizer_config arguments, sentencepiece model or None, GGUF pre-tokenizer name or None)"""
    text = corpus.training_text()
    end = st.special("<|endoftext|>")
    chatml = st.special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    think = st.plain("<tool_call>", "</tool_call>", "<think>", "</think>")
    llama3 = st.special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    sp = st.train_sentencepiece(N_VOCAB, text)
    inst = st.special("[INST]", "[/INST]")
    out = {}
    eot = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    out["gpt2"] = (st.byte_level("gpt2", N_VOCAB, text, end), eot, None, "gpt-2")
    out["added"] = (st.byte_level("qwen2", N_VOCAB, text, odd_added_tokens()), {"eos": "<|endoftext|>"}, None, None)
    config = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "add_bos": True, "chat_template": st.LLAMA3_CHAT}
    out["llama3"] = (st.byte_level("llama3", N_VOCAB, text, llama3, bos="<|begin_of_text|>"), config, None, "llama-bpe")
    llama4 = st.special("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")
    config = {"bos": "<|begin_of_text|>", "eos": "<|eot|>", "add_bos": True, "chat_template": st.LLAMA4_CHAT}
    out["o200k"] = (st.byte_level("o200k", N_VOCAB, text, llama4, bos="<|begin_of_text|>"), config, None, "llama4")
    config = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML}
    out["qwen2"] = (st.byte_level("qwen2", N_VOCAB, text, chatml + think), config, None, "qwen2")
    config = {"bos": "<|im_start|>", "eos": "<|im_end|>", "chat_template": st.CHATML}
    first = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
    out["smollm"] = (st.byte_level("smollm", N_VOCAB, text, first=first), config, None, "smollm")
    config = {"bos": "<s>", "eos": "</s>", "add_bos": True, "chat_template": st.MISTRAL_CHAT}
    out["mistral-legacy"] = (st.sentencepiece_bpe(sp, "legacy"), config, None, None)
    out["mistral-first"] = (st.sentencepiece_bpe(sp, "first", inst), config, None, None)
    out["mistral-always"] = (st.sentencepiece_bpe(sp, "always", inst), config, None, None)
    out["spm"] = (None, config, sp, None)
    gemma = st.train_gemma(N_VOCAB, text)
    config = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "add_bos": True, "chat_template": st.GEMMA_CHAT}
    out["gemma"] = (st.gemma_bpe(gemma), config, gemma, None)
    return out


def write_small(names):
    for name, (tok, config, sp, pre) in train().items():
        if names and name not in names:
            continue
        folder = TOKENIZERS / name
        if tok:
            save(folder / "tokenizer.json", st.tokenizer_json(tok, string_merges=name in ("gpt2", "llama3", "mistral-legacy")))
            save(folder / "tokenizer_config.json", st.tokenizer_config(**config))
        if sp and not tok:
            save(folder / "tokenizer.model", sp)
        if not sp and not pre:
            continue
        with tempfile.TemporaryDirectory() as tmp:
            path = Path(tmp) / "x.gguf"
            w = gguf.GGUFWriter(path, "llama")
            w.add_type("vocab")
            w.add_name(name)
            if name == "gemma":
                st.gguf_gemma(w, sp)
            elif sp:
                st.gguf_sentencepiece(w, sp)
            else:
                st.gguf_byte_level(w, tok, pre, config.get("bos"), config["eos"], config.get("add_bos", False))
            w.write_header_to_file()
            w.write_kv_data_to_file()
            w.write_tensors_to_file()
            w.close()
            save(folder / "vocab.gguf", path.read_bytes())


# --- golden files --------------------------------------------------------------------------------


class HuggingFace:
    def __init__(self, tok):
        self.tok = tok
        self.size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
        bare = tok.encode("x", add_special_tokens=False).ids
        full = tok.encode("x", add_special_tokens=True).ids
        at = full.index(bare[0])
        self.prefix, self.suffix = full[:at], full[at + len(bare) :]
        assert self.prefix + bare + self.suffix == full

    def encode(self, text):
        return self.tok.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tok.decode(ids, skip_special_tokens=False)


class SentencePiece:
    """The sentencepiece package; control tokens in the text are cut out first, what lies between is encoded on its own."""

    def __init__(self, model):
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size, self.prefix, self.suffix = self.sp.get_piece_size(), [1], []
        self.control = {"<unk>": 0, "<s>": 1, "</s>": 2}
        self.cut = re.compile("(" + "|".join(self.control) + ")")

    def encode(self, text):
        ids = []
        for part in self.cut.split(text):
            ids += [self.control[part]] if part in self.control else self.sp.encode(part) if part else []
        return ids


def load(name):
    if name == "smollm2":
        return HuggingFace(smollm2_tokenizer())
    if name == "spm":
        return SentencePiece((TOKENIZERS / name / "tokenizer.model").read_bytes())
    if name.endswith("-tiny"):
        return HuggingFace(Tokenizer.from_file(str(MODELS / name / "tokenizer.json")))
    folder = CACHE / "tokenizers" if name in FETCHED else TOKENIZERS
    return HuggingFace(Tokenizer.from_file(str(folder / name / "tokenizer.json")))


def dec_cases(t, encoded, rng):
    cases = []
    short = [i for i, ids in enumerate(encoded) if len(ids) <= 60]
    for i in sorted(rng.choice(short, 250, replace=False).tolist()):
        cases.append((i, encoded[i], t.decode(encoded[i])))
    used = sorted({i for ids in encoded for i in ids})
    for k in range(150):
        n = int(rng.integers(1, 24))
        if k % 3 == 0:  # any id
            ids = rng.integers(0, t.size, n).tolist()
        elif k % 3 == 1:  # ids of the test strings, which have more pieces of characters
            ids = [used[j] for j in rng.integers(0, len(used), n)]
        else:  # a cut that may go through a character
            ids = encoded[short[int(rng.integers(0, len(short)))]]
            if len(ids) > 2:
                a = int(rng.integers(0, len(ids) - 1))
                ids = ids[a : a + n]
        cases.append((NO_SOURCE, ids, t.decode(ids)))
    return cases


def write_golden(name, strings):
    t = load(name)
    encoded = [t.encode(s) for s in strings]
    folder = GOLDEN / "tokenizer"
    write_ids(folder / f"{name}.ids", t.size, encoded, t.prefix, t.suffix)
    if hasattr(t, "decode"):
        cases = dec_cases(t, encoded, np.random.default_rng(sum(name.encode())))
        write_dec(folder / f"{name}.dec", cases)
        n = sum(1 for i, _, text in cases if i != NO_SOURCE and text == strings[i])
        print(f"  {name}: {t.size} tokens, adds {t.prefix} {t.suffix}, {n} of 250 strings come back unchanged")


def main():
    names = [n for n in sys.argv[1:] if n != "-t"]
    strings = corpus.test_strings(N_STRINGS)
    if not names:
        write_strings(GOLDEN / "tokenizer" / "strings.bin", strings)
        write_small([])
        names = ["smollm2", *FETCHED, *sorted(p.name for p in TOKENIZERS.iterdir() if p.is_dir())]
    elif "-t" in sys.argv:
        write_small(names)
    for name in names:
        write_golden(name, strings)


if __name__ == "__main__":
    main()
