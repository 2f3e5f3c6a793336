"""Writes tests/data/models/bart-tiny/, tests/golden/encdec/bart-tiny.bin and bart-tiny.json.

An encoder-decoder model with random weights from a seed. The reference is transformers in F32 with eager attention. Encoder
and decoder differ in layers, heads and feed-forward size, so that a reader that takes one for the other is found out.
"""

import json
import math
import shutil

import numpy as np
import torch
from safetensors.torch import save as safetensors_save
from tokenizers import processors
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

import corpus
import small_tokenizers as st
from goldenio import GOLDEN, MODELS, save, write_encdec

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

CONFIG = {
    "activation_function": "gelu",
    "architectures": ["BartForConditionalGeneration"],
    "bos_token_id": 0,
    "d_model": 48,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "is_encoder_decoder": True,
    "max_position_embeddings": 320,
    "model_type": "bart",
    "pad_token_id": 1,
    "scale_embedding": True,
    "vocab_size": 512,
}
# Beams and n-grams are what paged leaves out, with a line in its log.
GENERATION = {
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "pad_token_id": 1,
}

# (encoder tokens, decoder prompt, positions): 1 token; text; several splits of keys on both sides.
CASES = ((1, 1, [0]), (2, 9, [0, 3, 8]), (37, 1, [0]), (37, 40, [0, 15, 16, 39]), (300, 150, [0, 63, 64, 127, 128, 149]), (320, 1, [0]))
N_GREEDY = 64
MIN_MARGIN = 1e-3  # of the logit range: ten times what the test allows as error


def init_weights(model, seed):
    gen = torch.Generator().manual_seed(seed)
    layers = model.config.decoder_layers
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            x = torch.randn(p.shape, generator=gen, dtype=torch.float32)
            if "layer_norm.weight" in name or "layernorm_embedding.weight" in name:
                if name == f"model.decoder.layers.{layers - 1}.final_layer_norm.weight":
                    x = 4 * x  # of both signs: with a tied head every token would else predict itself
                else:
                    x = 1 + 0.25 * x
            elif name.endswith(".bias"):
                x = 0.1 * x
            elif "shared" in name or "embed_tokens" in name:
                x = 0.15 * x
            elif "q_proj" in name or "k_proj" in name:
                x = x * 2.1 / math.sqrt(p.shape[1])
            elif "embed_positions" not in name:
                x = x / math.sqrt(p.shape[1])
            p.copy_(x)
        model.final_logits_bias.copy_(0.2 * torch.randn(model.final_logits_bias.shape, generator=gen))
        model.final_logits_bias[0, 2] = 4  # some texts come to an end before their limit
    return model


def make_tokenizer():
    tok = st.byte_level("gpt2", 512, corpus.training_text("english"), first=("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    tok.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return tok


def logits_of(model, encoder, decoder):
    with torch.no_grad():
        return model(input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([decoder]), use_cache=False).logits[0]


def greedy(model, encoder, decoder, n, min_margin):
    """None as soon as a step is close to a tie."""
    ids, margins = list(decoder), []
    for _ in range(n):
        top = torch.topk(logits_of(model, encoder, ids)[-1], 2)
        margins.append(float(top.values[0] - top.values[1]))
        if margins[-1] < min_margin:
            return None, margins
        ids.append(int(top.indices[0]))
    return ids[len(decoder) :], margins


def make_case(model, wide, n_encoder, n_decoder, where, text_ids):
    for seed in range(400):
        rng = np.random.default_rng([n_encoder, n_decoder, seed])
        if n_encoder == 37:  # real text
            at = int(rng.integers(0, len(text_ids) - n_encoder))
            encoder = [0, *text_ids[at : at + n_encoder - 2], 2]
        else:
            encoder = rng.integers(3, 512, n_encoder).tolist()
        decoder = [2, *rng.integers(3, 512, n_decoder - 1).tolist()]
        logits = logits_of(model, encoder, decoder)
        spread = float(logits[where].max() - logits[where].min())
        tokens, margins = greedy(model, encoder, decoder, N_GREEDY, MIN_MARGIN * spread)
        if tokens is None or len(set(tokens)) < 8:
            continue
        error = float((logits_of(wide, encoder, decoder) - logits).abs().max()) / spread
        print(
            f"  {n_encoder} + {n_decoder} tokens: range {spread:.2f}, smallest margin {min(margins) / spread:.1e} of it, "
            f"F32 against F64 {error:.1e}, {len(set(tokens))} distinct greedy tokens, seed {seed}"
        )
        return {
            "encoder": encoder,
            "prompt": decoder,
            "positions": where,
            "greedy": tokens,
            "margin": margins,
            "logits": logits[where].numpy(),
        }
    raise SystemExit(f"no prompt of {n_encoder} + {n_decoder} tokens with clear greedy steps")


def generate(model, hf, text, max_tokens):
    ids = hf(text)["input_ids"]
    out = model.generate(
        torch.tensor([ids]), num_beams=1, do_sample=False, no_repeat_ngram_size=0, max_new_tokens=max_tokens
    )[0].tolist()
    return {
        "prompt": text,
        "encoder_ids": ids,
        "max_tokens": max_tokens,
        "ids": out[1:],
        "text": hf.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False),
    }


def clear(model, case):
    """No step of this completion is close to a tie."""
    ids = [2]
    for i, token in enumerate(case["ids"]):
        logits = logits_of(model, case["encoder_ids"], ids)[-1]
        top = torch.topk(logits, 2)
        forced = i == 0 or i == case["max_tokens"] - 1
        if not forced and (int(top.indices[0]) != token or float(top.values[0] - top.values[1]) < 0.02):
            return False
        ids.append(token)
    return True


def make_texts(model, hf):
    words = corpus.english().split()
    out = []
    for n_words, max_tokens, ends in ((1, 16, 0), (6, 1, 0), (8, 2, 0), (20, 64, 0), (30, 40, 0), (85, 64, 0), (3, 64, 0), (12, 64, 1)):
        for at in range(0, 3000, 7):
            case = generate(model, hf, " ".join(words[at : at + n_words]), max_tokens)
            if ends != (len(case["ids"]) < max_tokens):
                continue
            if len(case["encoder_ids"]) <= 320 and clear(model, case) and not any(c["prompt"] == case["prompt"] for c in out):
                print(f"  {len(case['encoder_ids'])} tokens: {len(case['ids'])} of {max_tokens}: {case['text'][:60]!r}")
                out.append(case)
                break
        else:
            raise SystemExit(f"no text of {n_words} words with clear greedy steps")
    return out


def sensitivity(model, case):
    """How far the logits move when something is wrong: the test must see each of these."""
    want = torch.tensor(case["logits"])
    spread = float(want.max() - want.min())

    def off():
        return float((logits_of(model, case["encoder"], case["prompt"])[case["positions"]] - want).abs().max()) / spread

    out = {}
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    for m in norms:
        m.eps = 1e-4
    out["epsilon x 10"] = off()
    for m in norms:
        m.eps = 1e-5
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    for m in layers:
        m.activation_fn = torch.nn.GELU(approximate="tanh")
    out["GELU by tanh"] = off()
    for m in layers:
        m.activation_fn = torch.nn.GELU()
    print("  sensitivity: " + ", ".join(f"{k} {v:.1e}" for k, v in out.items()))


def main():
    folder = MODELS / "bart-tiny"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION)):
        save(folder / name, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
    tok = make_tokenizer()
    save(folder / "tokenizer.json", st.tokenizer_json(tok, string_merges=True))
    save(folder / "tokenizer_config.json", st.tokenizer_config(bos="<s>", eos="</s>", pad="<pad>", length=320))

    model = BartForConditionalGeneration._from_config(BartConfig(**CONFIG), attn_implementation="eager", dtype=torch.float32)
    model = init_weights(model, 20).eval()
    tied = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save(folder / "model.safetensors", safetensors_save(state, {"format": "pt"}))

    # The reference reads the files just written.
    load = BartForConditionalGeneration.from_pretrained
    ref = load(folder, attn_implementation="eager", dtype=torch.float32).eval()
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in ref.state_dict().items())
    wide = load(folder, attn_implementation="eager", dtype=torch.float64).eval()
    text_ids = tok.encode(corpus.english(), add_special_tokens=False).ids
    hf = AutoTokenizer.from_pretrained(folder)
    assert hf("a text")["input_ids"] == tok.encode("a text").ids
    print(f"bart: {sum(v.numel() for v in state.values())} weights, text of {len(text_ids)} tokens")
    cases = [make_case(ref, wide, *case, text_ids) for case in CASES]
    sensitivity(ref, cases[4])
    write_encdec(GOLDEN / "encdec" / "bart-tiny.bin", CONFIG["vocab_size"], cases)
    texts = make_texts(ref, hf)
    save(GOLDEN / "encdec" / "bart-tiny.json", json.dumps(texts, indent=1, ensure_ascii=False).encode() + b"\n")


main()
