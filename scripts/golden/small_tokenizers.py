"""Trains small tokenizers that follow the rules of well-known ones, and writes them as tokenizer.json and as GGUF."""

import io
import json

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import corpus

# The expressions that the tokenizer.json files of these families carry (they are data of the format).
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA4_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def special(*names):
    return [AddedToken(n, special=True, normalized=False) for n in names]


def plain(*names, **flags):
    return [AddedToken(n, special=False, **({"normalized": False} | flags)) for n in names]


def pre_tokenizer(rule):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in ("gpt2", "smollm"))
    if rule == "gpt2":
        return byte_level
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split = {"llama3": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT, "o200k": O200K_SPLIT}[rule]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated", invert=False), byte_level])


def byte_level(rule, n_vocab, text, added=(), first=(), bos=None):
    """A byte-level BPE of n_vocab tokens; `first` are special tokens with the lowest ids, `added` come last."""
    tok = Tokenizer(models.BPE(ignore_merges=rule == "llama3"))
    tok.pre_tokenizer = pre_tokenizer(rule)
    tok.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tok.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(added),
        special_tokens=special(*first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(text, trainer)
    for token in added:
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    level = processors.ByteLevel(trim_offsets=False)
    if bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tok.token_to_id(bos))])
        tok.post_processor = processors.Sequence([level, template])
    else:
        tok.post_processor = level
    return tok


def train_sentencepiece(n_vocab, text, **options):
    """A sentencepiece BPE model with byte fallback, as Llama 2 and Mistral have; returns the model file's bytes."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for part in text for line in part.splitlines()]),
        model_writer=out,
        model_type="bpe",
        vocab_size=n_vocab,
        character_coverage=0.9995,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return out.getvalue()


def train_gemma(n_vocab, text):
    """The same as Gemma has it: other special tokens, no space in front; the last two pieces mark turns."""
    names = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    names |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "unk_piece": "<unk>"}
    return train_sentencepiece(n_vocab - 2, text, add_dummy_prefix=False, **names)


def pieces(model):
    """(text, score, GGUF token type) of every piece."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    out = []
    for i in range(sp.get_piece_size()):
        kind = gguf.TokenType.NORMAL
        if sp.is_unknown(i):
            kind = gguf.TokenType.UNKNOWN
        elif sp.is_control(i):
            kind = gguf.TokenType.CONTROL
        elif sp.is_byte(i):
            kind = gguf.TokenType.BYTE
        out.append((sp.id_to_piece(i), sp.get_score(i), int(kind)))
    return out


def merges_of(table):
    """The merges that pieces with scores stand for, best first."""
    vocab = {text: i for i, (text, _, _) in enumerate(table)}
    merges = []
    for text, score, kind in table:
        if kind == gguf.TokenType.NORMAL:
            for k in range(1, len(text)):
                a, b = text[:k], text[k:]
                if a in vocab and b in vocab:
                    merges.append((-score, vocab[a], vocab[b], (a, b)))
    return [m[3] for m in sorted(merges)]


def gemma_bpe(model):
    """tokenizer.json as Gemma 2 and 3 have it: spaces become marks before anything else, so that its Split never splits."""
    table = pieces(model)
    vocab = {text: i for i, (text, _, _) in enumerate(table)}
    tok = Tokenizer(models.BPE(vocab, merges_of(table), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens(special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"))
    tok.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", tok.token_to_id("<bos>"))]
    )
    return tok


def sentencepiece_bpe(model, form, added=()):
    """The tokenizer.json form of a sentencepiece BPE model.

    form: 'legacy' (a normalizer puts the space in front, of every piece between special tokens),
          'first'  (Metaspace, in front of the text only), 'always' (Metaspace, in front of every piece).
    """
    table = pieces(model)
    vocab = {text: i for i, (text, _, _) in enumerate(table)}
    tok = Tokenizer(models.BPE(vocab, merges_of(table), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if form == "legacy":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    tok.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(special("<unk>", "<s>", "</s>"))
    if added:
        tok.add_special_tokens(list(added))
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]
    )
    return tok


# --- output -------------------------------------------------------------------------------------


def tokenizer_json(tok, string_merges=False):
    """string_merges: 'a b' as older files have it, instead of ['a', 'b']."""
    d = json.loads(tok.to_str())
    if string_merges:
        d["model"]["merges"] = [" ".join(m) for m in d["model"]["merges"]]
    return json.dumps(d, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def tokenizer_config(bos=None, eos=None, pad=None, add_bos=False, chat_template=None, length=2048):
    d = {
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": length,
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template:
        d["chat_template"] = chat_template
    return json.dumps(d, ensure_ascii=False, indent=2).encode() + b"\n"


def gguf_byte_level(w, tok, pre, bos=None, eos=None, add_bos=False, n_vocab=None):
    """Writes the tokenizer of a byte-level BPE into the GGUF writer w."""
    d = json.loads(tok.to_str())
    added = {t["id"]: t for t in d["added_tokens"]}
    n = tok.get_vocab_size()
    tokens, kinds = [], []
    for i in range(n_vocab or n):
        if i >= n:
            tokens.append(f"[PAD{i}]")
            kinds.append(gguf.TokenType.UNUSED)
        else:
            tokens.append(tok.id_to_token(i))
            normal, control, user = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
            kinds.append(normal if i not in added else control if added[i]["special"] else user)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(m) for m in d["model"]["merges"]])
    if bos:
        w.add_bos_token_id(tok.token_to_id(bos))
    if eos:
        w.add_eos_token_id(tok.token_to_id(eos))
    w.add_add_bos_token(add_bos)


def gguf_gemma(w, model):
    table = pieces(model)
    control = [("<start_of_turn>", -1000.0, int(gguf.TokenType.CONTROL)), ("<end_of_turn>", -1000.0, int(gguf.TokenType.CONTROL))]
    table += control
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([t for t, _, _ in table])
    w.add_token_scores([s for _, s, _ in table])
    w.add_token_types([k for _, _, k in table])
    w.add_bos_token_id(2)
    w.add_eos_token_id(1)
    w.add_unk_token_id(3)
    w.add_pad_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(False)


def gguf_sentencepiece(w, model):
    table = pieces(model)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([t for t, _, _ in table])
    w.add_token_scores([s for _, s, _ in table])
    w.add_token_types([k for _, _, k in table])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(True)


def model_tokenizers():
    """The 512-token tokenizers of the tiny models: name -> (tokenizer, sentencepiece model or None)."""
    text = corpus.training_text("english")
    llama3 = special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    chatml = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    sp = train_sentencepiece(512, text)
    gemma = train_gemma(512, text)
    return {
        "llama31": (byte_level("llama3", 512, text, llama3, bos="<|begin_of_text|>"), None),
        "mistral": (sentencepiece_bpe(sp, "first"), sp),
        "qwen2": (byte_level("qwen2", 500, text, chatml), None),
        "qwen3": (byte_level("qwen2", 512, text, chatml + plain("<think>", "</think>")), None),
        "smollm3": (byte_level("llama3", 512, text, chatml + plain("<think>", "</think>")), None),
        "gemma2": (gemma_bpe(gemma), gemma),
        "gemma3": (gemma_bpe(gemma), gemma),
        "llama4": (byte_level("llama3", 512, text, llama3, bos="<|begin_of_text|>"), None),
        "mistral-swa": (sentencepiece_bpe(sp, "first"), sp),
        "qwen3-swa": (byte_level("qwen2", 512, text, chatml + plain("<think>", "</think>")), None),
        "mixtral": (sentencepiece_bpe(sp, "first"), sp),
        "qwen3moe": (byte_level("qwen2", 512, text, chatml + plain("<think>", "</think>")), None),
        "gptoss": (byte_level("llama3", 512, text, llama3, bos="<|begin_of_text|>"), None),
    }
