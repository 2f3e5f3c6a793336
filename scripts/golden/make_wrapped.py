"""Writes the tiny models whose text part stands inside a model of text and images, as make_models.py writes the others.

  make_wrapped.py [NAME…]   all of them, or these

The file is what save_pretrained makes of the whole model. The reference is that model, read as a whole. config.json
leaves out what real ones do: what the text class fills in.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import corpus
import small_tokenizers as st
from goldenio import GOLDEN, MODELS, save, write_logits
from hybrid_specs import GEMMA_TOKENIZER, LENGTHS
from make_models import init_weights, make_case, pretty

VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
LLAMA4_VISION = {"model_type": "llama4_vision_model", "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8}

SPECS = {
    "gemma3-wrapped": {
        "config": {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 511],
            "mm_tokens_per_image": 4,
            "torch_dtype": "float32",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "query_pre_attn_scalar": 24,
                "sliding_window": 24,
                "sliding_window_pattern": 3,
                "vocab_size": 512,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
        },
        "tokenizer": GEMMA_TOKENIZER,
    },
    "llama4-wrapped": {
        "config": {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "torch_dtype": "float32",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 32,
                "intermediate_size": 32,
                "intermediate_size_mlp": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "attention_chunk_size": 24,
                "no_rope_layers": [],
                "no_rope_layer_interval": 3,
                "floor_scale": 16,
                "attn_scale": 0.3,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
                "vocab_size": 512,
                "max_position_embeddings": 2048,
                "bos_token_id": 507,
                "eos_token_id": [508, 511],
                "pad_token_id": 508,
            },
            "vision_config": VISION | LLAMA4_VISION,
        },
        "generation": {"bos_token_id": 507, "eos_token_id": [508, 511], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "tokenizer": {"bos": "<|begin_of_text|>", "eos": "<|eot|>", "chat_template": st.LLAMA4_CHAT, "add_bos": True},
    },
}


def tokenizers():
    text = corpus.training_text("english")
    llama4 = st.special("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")
    return {
        "gemma3-wrapped": st.gemma_bpe(st.train_gemma(512, text)),
        "llama4-wrapped": st.byte_level("o200k", 512, text, llama4, bos="<|begin_of_text|>"),
    }


def read(folder, dtype):
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    return AutoModelForImageTextToText.from_pretrained(folder, **how).eval()


def make(name, tok):
    spec = SPECS[name]
    folder = MODELS / f"{name}-tiny"
    shutil.rmtree(folder, ignore_errors=True)
    save(folder / "config.json", pretty(spec["config"]))
    if "generation" in spec:
        save(folder / "generation_config.json", pretty(spec["generation"]))
    save(folder / "tokenizer.json", st.tokenizer_json(tok))
    save(folder / "tokenizer_config.json", st.tokenizer_config(**spec["tokenizer"]))

    seed = sum(name.encode())
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    text = init_weights(AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32), torch.float32, seed)
    if config.model_type == "gemma3":
        whole.model.language_model.load_state_dict(text.model.state_dict())
    else:
        whole.language_model.load_state_dict(text.state_dict())
    with tempfile.TemporaryDirectory() as tmp:
        whole.save_pretrained(tmp)
        save(folder / "model.safetensors", (Path(tmp) / "model.safetensors").read_bytes())

    ref, wide = read(folder, torch.float32), read(folder, torch.float64)
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in ref.state_dict().items())
    text_ids = tok.encode(corpus.english(), add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(folder)(corpus.english(), add_special_tokens=False)["input_ids"] == text_ids
    print(f"{name}: {sum(v.numel() for v in whole.state_dict().values())} weights, text of {len(text_ids)} tokens")
    if config.model_type == "llama4":  # 5.24 fails behind the text model when there is no image
        ref, wide = ref.language_model, wide.language_model
    cases = [make_case(ref, wide, n, where, text_ids, tok.get_vocab_size()) for n, where in LENGTHS.items()]
    write_logits(GOLDEN / "logits" / f"{name}-tiny.bin", config.text_config.vocab_size, cases)


if __name__ == "__main__":
    for name, tok in tokenizers().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, tok)
