#!/usr/bin/env python3
"""Trains the bundled model, config/models/paged-tiny.gguf, from public-domain books.

The model is the fallback default of the daemon and the model of its fast tests, so it has to be
small (4 MB), load anywhere a Llama GGUF loads, and write recognisable English.

Choices
  shape      Llama: 5 layers of width 256, 4 query and 2 key/value heads of 64, SwiGLU of 512, tied
             embeddings, context 1024; 3.5 M weights. Every row is a multiple of 256, so that it can
             be stored in any GGUF block type.
  rope       Adjacent pairs (x0,x1), (x2,x3), ... are rotated while training. That is the order GGUF
             expects of Llama files, so Q and K are written as they are, without a permutation.
  tokenizer  Byte-level BPE of 2048 tokens behind the GPT-2 regex: all 256 bytes are in it, hence
             any input has an encoding. <|endoftext|> starts and ends every chapter.
  optimiser  Muon for the matrices, AdamW for embeddings and norms; the learning rate falls linearly
             with the *clock*, so that the run ends annealed after --minutes on any machine. A rerun
             gives an equally good model, not the same bytes.
  windows    Mostly 256 tokens, some of 512 and 1024, so that positions up to the context are known.
  precision  Activations in bfloat16 where that is measured to be faster. Stored as Q8_0, norms F32.

Obtaining the text (Debian 12; the package of each book is in BOOKS below)
  apt-get install bible-kjv r-cran-janeaustenr r-cran-tokenizers golang-src dict-devil miscfiles
  mkdir -p text && cd text
  bible -f gen1:1-rev22:21 </dev/null >kjv.txt
  for b in sensesensibility prideprejudice mansfieldpark emma northangerabbey persuasion; do
    Rscript -e "writeLines(janeaustenr::$b, '$b.txt')"
  done
  Rscript -e 'writeLines(tokenizers::mobydick, "mobydick.txt")'
  cp /usr/share/go-*/src/testdata/Isaac.Newton-Opticks.txt opticks.txt
  zcat -S .dz /usr/share/dictd/devil.dict.dz >devil.txt
  zcat /usr/share/state/us-*.gz >us.txt

Running (Python 3.11, two cores, under an hour)
  pip install -r scripts/train_tiny_requirements.txt
  OMP_WAIT_POLICY=passive nice -n 19 python scripts/train_tiny.py --text text/*.txt

OMP_WAIT_POLICY keeps idle threads from spinning, which helps where others use the cores too. The
output is replaced by each better model while training, so a run can be stopped at any time.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# ---- text -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Book:
    """A text that may be used, and the words it starts and ends with.

    Whatever lies outside these words (title pages, licences of the transcription) is cut off, and a
    file that lacks them is refused, which makes the table the licence check as well.
    """

    title: str
    author: str
    year: int
    package: str
    first: str
    last: str


# All authors died more than a century ago, the US documents are works of the federal government.
BOOKS = {
    "kjv": Book("King James Bible", "", 1611, "bible-kjv-text",
                "In the beginning God", "be with you all. Amen."),
    "opticks": Book("Opticks", "Isaac Newton", 1730, "golang-src",
                    "My Design in this Book", "before they corrupted themselves."),
    "us": Book("Constitution and Declaration of Independence", "United States", 1787, "miscfiles",
               "We the People", "our sacred Honor."),
    "sensesensibility": Book("Sense and Sensibility", "Jane Austen", 1811, "r-cran-janeaustenr",
                             "The family of Dashwood", "coolness between their husbands."),
    "prideprejudice": Book("Pride and Prejudice", "Jane Austen", 1813, "r-cran-janeaustenr",
                           "It is a truth universally", "the means of uniting them."),
    "mansfieldpark": Book("Mansfield Park", "Jane Austen", 1814, "r-cran-janeaustenr",
                          "About thirty years ago Miss", "Mansfield Park had long been."),
    "emma": Book("Emma", "Jane Austen", 1815, "r-cran-janeaustenr",
                 "Emma Woodhouse, handsome", "happiness of the union."),
    "northangerabbey": Book("Northanger Abbey", "Jane Austen", 1817, "r-cran-janeaustenr",
                            "No one who had ever seen", "or reward filial disobedience."),
    "persuasion": Book("Persuasion", "Jane Austen", 1817, "r-cran-janeaustenr",
                       "Sir Walter Elliot, of Kellynch", "than in its national importance."),
    "mobydick": Book("Moby Dick", "Herman Melville", 1851, "r-cran-tokenizers",
                     "Call me Ishmael", "only found another orphan."),
    "devil": Book("The Devil's Dictionary", "Ambrose Bierce", 1911, "dict-devil",
                  "ABASEMENT, n.", "sheds its horn every two years."),
}

VERSE = re.compile(r"^\d?[A-Za-z]+(\d+):(\d+) ", re.M)
HEADING = re.compile(r"^(?:VOLUME|CHAPTER|BOOK|Article|Section)\s+[IVXLC\d]+\b[^\n]*$", re.M | re.I)
NOISE = re.compile(r"\[Illustration[^]]*\]|\[[A-Z]\]|\[\d+\]|_|^ *(?:\* *)+$|^[-+| ]*$", re.M)


def body(book, text):
    """The text from the first to the last words of the book, both included."""
    def find(words):
        pattern = r"\s+".join(map(re.escape, words.split()))
        found = list(re.finditer(pattern, text))
        if not found:
            sys.exit(f"{book.title}: expected the words {words!r}, is this the right file?")
        return found
    return text[find(book.first)[0].start():find(book.last)[-1].end()]


def unwrap(paragraph):
    """Joins the lines of prose; lines that are indented (verse) stay lines."""
    lines = paragraph.split("\n")
    joined = lines[0].strip()
    for line in lines[1:]:
        joined += ("\n" if line.startswith("  ") else " ") + line.strip()
    return re.sub(r" +", " ", joined).strip()


def chapters(book, text):
    """The clean chapters of a book, paragraphs separated by an empty line."""
    text = text.replace("\r", "").replace("\t", "    ")
    if VERSE.match(text):  # one verse a line: chapters begin at verse 1
        text = VERSE.sub(lambda m: "CHAPTER 1\n" if m[2] == "1" else "", text)
    text = NOISE.sub("", body(book, text))
    for part in HEADING.split(text):
        paragraphs = [unwrap(p) for p in re.split(r"\n\s*\n", part.strip("\n"))]
        chapter = "\n\n".join(p for p in paragraphs if p)
        if len(chapter) > 200:
            yield chapter


def read_books(paths):
    """Returns the books used and all their chapters."""
    used, all_chapters = [], []
    for path in paths:
        book = BOOKS.get(path.stem)
        if book is None:
            sys.exit(f"{path}: not in BOOKS; add it with evidence that it is in the public domain")
        found = list(chapters(book, path.read_text(encoding="utf-8-sig")))
        print(f"{book.title}: {len(found)} chapters, {sum(map(len, found))} characters")
        used.append(book)
        all_chapters += found
    return used, all_chapters


# ---- tokenizer --------------------------------------------------------------------------------

END = "<|endoftext|>"


def train_tokenizer(texts, n_vocab):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_vocab, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def encode(tokenizer, texts):
    """One stream of token ids, every text between two END tokens."""
    end = tokenizer.token_to_id(END)
    ids = [end]
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids + [end]
    return torch.tensor(ids)


# ---- model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    n_vocab: int = 2048
    n_layers: int = 5
    dim: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_dim: int = 512
    max_context: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def rotate(x, cos, sin):
    """Rotary embedding of adjacent pairs; x [batch, heads, tokens, head_dim]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.shape = s
        self.attn_norm = nn.RMSNorm(s.dim, s.norm_eps)
        self.attn_q = nn.Linear(s.dim, s.n_heads * s.head_dim, bias=False)
        self.attn_k = nn.Linear(s.dim, s.n_kv_heads * s.head_dim, bias=False)
        self.attn_v = nn.Linear(s.dim, s.n_kv_heads * s.head_dim, bias=False)
        self.attn_output = nn.Linear(s.n_heads * s.head_dim, s.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(s.dim, s.norm_eps)
        self.ffn_gate = nn.Linear(s.dim, s.ffn_dim, bias=False)
        self.ffn_up = nn.Linear(s.dim, s.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(s.ffn_dim, s.dim, bias=False)

    def forward(self, x, cos, sin):
        s = self.shape
        h = self.attn_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
                   for w in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        n_shared = s.n_heads // s.n_kv_heads
        k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(a.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Model(nn.Module):
    """Parameter names are those of the GGUF tensors, less ".weight"; the output is tied."""

    def __init__(self, s):
        super().__init__()
        self.shape = s
        self.token_embd = nn.Embedding(s.n_vocab, s.dim)
        self.blk = nn.ModuleList(Layer(s) for _ in range(s.n_layers))
        self.output_norm = nn.RMSNorm(s.dim, s.norm_eps)
        freq = s.rope_theta ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        angle = torch.outer(torch.arange(s.max_context), freq)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * s.n_layers) if residual else 1))

    def forward(self, ids):
        n_tokens = ids.shape[1]
        cos, sin = self.cos[:n_tokens], self.sin[:n_tokens]
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, cos, sin)
        return F.linear(self.output_norm(x), self.token_embd.weight)

    def loss(self, ids):
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def sample(model, tokenizer, prompt, n_tokens=100, temperature=0.8):
    ids = [tokenizer.token_to_id(END)] + tokenizer.encode(prompt).ids
    for _ in range(n_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        ids.append(int(torch.multinomial(F.softmax(logits / temperature, -1), 1)))
        if ids[-1] == ids[0]:
            break
    return tokenizer.decode(ids)


# ---- export -----------------------------------------------------------------------------------


def export(path, model, tokenizer, books):
    """Writes the GGUF file; an older one is replaced in one step."""
    s = model.shape
    names = sorted({f"{b.title} ({b.author + ', ' if b.author else ''}{b.year})" for b in books})
    packages = sorted({b.package for b in books})
    end = tokenizer.token_to_id(END)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    kind = gguf.TokenType

    tmp = path.with_suffix(".tmp")
    w = gguf.GGUFWriter(tmp, "llama")
    w.add_name("paged-tiny")
    w.add_description("Trained from nothing by scripts/train_tiny.py on public-domain English from "
                      f"the Debian packages {', '.join(packages)}: {'; '.join(names)}.")
    w.add_license("CC0-1.0")
    w.add_languages(["en"])
    w.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(s.n_vocab)
    w.add_context_length(s.max_context)
    w.add_embedding_length(s.dim)
    w.add_block_count(s.n_layers)
    w.add_feed_forward_length(s.ffn_dim)
    w.add_head_count(s.n_heads)
    w.add_head_count_kv(s.n_kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_rope_dimension_count(s.head_dim)
    w.add_rope_freq_base(s.rope_theta)
    w.add_layer_norm_rms_eps(s.norm_eps)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([tokenizer.id_to_token(i) for i in range(s.n_vocab)])
    w.add_token_types([kind.CONTROL if i == end else kind.NORMAL for i in range(s.n_vocab)])
    w.add_token_merges(merges)
    w.add_bos_token_id(end)
    w.add_eos_token_id(end)
    w.add_add_bos_token(False)
    for name, p in model.named_parameters():
        data = p.detach().float().numpy()
        if data.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(data, q8), raw_dtype=q8)
        else:
            w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(tmp, path)


# ---- training ---------------------------------------------------------------------------------

TOKENS_PER_STEP = 4096
WINDOWS = (256, 512, 1024)
WINDOW_SHARE = (0.75, 0.15, 0.10)


def faster_dtype():
    """bfloat16 if this CPU multiplies it faster than float32."""
    def seconds(dtype):
        a, b = torch.ones(4096, 256, dtype=dtype), torch.ones(256, 512, dtype=dtype)
        a @ b
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        return time.perf_counter() - start
    return min((torch.float32, torch.bfloat16), key=seconds)


def batches(stream, seed):
    """Endless batches of windows at random places, [n_windows, window + 1]."""
    rng = np.random.default_rng(seed)
    while True:
        window = int(rng.choice(WINDOWS, p=WINDOW_SHARE))
        starts = rng.integers(0, len(stream) - window - 1, TOKENS_PER_STEP // window)
        yield torch.stack([stream[i:i + window + 1] for i in starts])


@torch.no_grad()
def evaluate(model, stream, window):
    rows = stream[:len(stream) // (window + 1) * (window + 1)].view(-1, window + 1)
    return sum(model.loss(r).item() * len(r) for r in rows.split(16)) / len(rows)


def train(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    books, texts = read_books(args.text)
    held_out = texts[25::50]
    texts = [t for i, t in enumerate(texts) if i % 50 != 25]
    shape = Shape()
    tokenizer = train_tokenizer(texts, shape.n_vocab)
    train_ids, test_ids = encode(tokenizer, texts), encode(tokenizer, held_out)
    model = Model(shape)
    n_test_bytes = sum(len(t.encode()) for t in held_out)
    bits_per_byte = len(test_ids) / n_test_bytes / math.log(2)
    dtype = faster_dtype()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(train_ids)} tokens to "
          f"train, {len(test_ids)} to test, {dtype}", flush=True)

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blk")]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or not n.startswith("blk")]
    optimisers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    start, best, last_test, step, total = time.monotonic(), math.inf, 0.0, 0, 0.0
    for batch in batches(train_ids, args.seed):
        elapsed = time.monotonic() - start
        done = min(1.0, elapsed / (60 * args.minutes))
        if done == 1.0 or elapsed - last_test > 60 * args.test_minutes:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = evaluate(model, test_ids, WINDOWS[0])
            print(f"test: {elapsed / 60:.1f} min, loss {loss:.4f}, "
                  f"{loss * bits_per_byte:.3f} bits per byte", flush=True)
            if loss < best:
                best = loss
                export(args.out, model, tokenizer, books)
                print("  " + sample(model, tokenizer, "It was").replace("\n", "\n  "), flush=True)
            last_test = time.monotonic() - start
        if done == 1.0:
            break
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = args.lr * min((step + 1) / 100, 1.0 - done)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        total += loss.item()
        if step % 50 == 0:
            elapsed = time.monotonic() - start
            print(f"step {step}, {elapsed / 60:.1f} min, loss {total / 50:.3f}, "
                  f"{step * TOKENS_PER_STEP / elapsed:.0f} tok/s", flush=True)
            total = 0.0
    print(f"{args.out}: {args.out.stat().st_size} bytes, loss {best:.4f}, at 1024 tokens "
          f"{evaluate(model, test_ids, WINDOWS[-1]):.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE",
                        help="books, named as in BOOKS")
    parser.add_argument("--out", type=Path, default=Path("config/models/paged-tiny.gguf"))
    parser.add_argument("--minutes", type=float, default=45, help="wall time to train")
    parser.add_argument("--test-minutes", type=float, default=4, help="between tests and exports")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
