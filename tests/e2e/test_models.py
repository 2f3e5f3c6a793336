"""Model files through the whole program: each tiny model in each of its forms, and files with quantized weights.

The API's greedy ids for the golden prompts are those of transformers (tests/golden/README.md). The tiny models hold random weights, so that a
KV cache in F16 could tip a choice: it is F32 here. Files with quantized weights are made by the unit test of the same models.
"""
import os
import struct
import subprocess

import pytest
from conftest import BUILD, PAGED, ROOT, SLOW

MODELS = ROOT / "tests" / "data" / "models"
LOGITS = ROOT / "tests" / "golden" / "logits"
MAKER = BUILD / "tests" / "unit" / "test_quantized_models"
FORMS = [form for d in sorted(MODELS.iterdir()) if (LOGITS / f"{d.name}.bin").exists() for form in (d, *sorted(d.glob("*.gguf")))]
QUANTIZED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
MIXED = ["mixed-k", "mixed-untied", "mixed-float"]


def golden_cases(path):
    """[(prompt ids, greedy ids)]"""
    data = path.read_bytes()
    magic, n_cases, vocab_size = struct.unpack_from("<8sII", data)
    assert magic == b"PGLOGIT1"
    at = 16
    cases = []
    for _ in range(n_cases):
        n_prompt, n_positions, n_greedy, _ = struct.unpack_from("<IIIf", data, at)
        prompt = struct.unpack_from(f"<{n_prompt}I", data, at + 16)
        at += 16 + 4 * (n_prompt + n_positions)
        cases.append((list(prompt), list(struct.unpack_from(f"<{n_greedy}I", data, at))))
        at += 4 * (2 * n_greedy + n_positions * vocab_size)
    assert at == len(data)
    return cases


def paged(*args):
    """stdout of a command that ends well"""
    result = subprocess.run([str(a) for a in (PAGED, *args)], capture_output=True, stdin=subprocess.DEVNULL,
                            timeout=60 * SLOW)
    errors = result.stderr.decode(errors="replace")
    assert result.returncode == 0 and "Sanitizer" not in errors, errors
    return result.stdout.decode()


def run(model, prompt, tmp_path, *flags):
    return paged("run", "--model", model, "--temperature", "0", "-n", "8", "-p", prompt, "--runtime-dir", tmp_path / "run",
                 *flags)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_greedy_tokens_of_every_form(form, daemons, tmp_path, monkeypatch):
    if "mxfp4" in form.name:  # the same weights, but the fast levels round activations for that type
        monkeypatch.setenv("PGD_CPU_ISA", "ref")
    name = form.parent.name if form.is_file() else form.name
    cases = golden_cases(LOGITS / f"{name}.bin")
    d = daemons("--kv-cache-dtype", "f32", model=form)
    for prompt, greedy in cases:
        for n in (8, len(greedy)):  # the second one takes the first one's KV from the cache
            choice = d.complete(prompt, max_tokens=n, temperature=0, ignore_eos=True, return_token_ids=True)["choices"][0]
            assert choice["token_ids"] == greedy[:n]
    want = d.text("Once upon a time", max_tokens=8, temperature=0)
    d.stop()
    assert run(form, "Once upon a time", tmp_path, "--kv-cache-dtype", "f32") == want
    assert paged("inspect", form).endswith("this build can run it: yes\n")


@pytest.fixture(scope="module")
def quantized_dir(tmp_path_factory):
    if not os.access(MAKER, os.X_OK):
        pytest.skip(f"no {MAKER}; make test-unit builds it")
    path = tmp_path_factory.mktemp("quantized")
    subprocess.run([MAKER, path], check=True, cwd=ROOT, timeout=60 * SLOW)
    return path


@pytest.mark.parametrize("name", QUANTIZED + MIXED)
def test_quantized_files_run(name, quantized_dir, tmp_path):
    model = quantized_dir / f"{name}.gguf"
    listing = paged("inspect", model)
    assert listing.endswith("this build can run it: yes\n")
    types = {line.split()[0] for line in listing.split("type            tensors")[1].split("\n\n")[0].splitlines()[1:]}
    assert types == {"F32", name} if name in QUANTIZED else len(types) > 2
    text = run(model, "And it came to pass", tmp_path, "--ignore-eos")
    assert len(text.split()) > 1 and text.isprintable(), text  # English, not bytes


@pytest.mark.parametrize("name", MIXED)
def test_quantized_files_are_served(name, quantized_dir, daemons, tmp_path):
    model = quantized_dir / f"{name}.gguf"
    prompt = "And it came to pass"
    want = run(model, prompt, tmp_path, "--ignore-eos")
    assert daemons(model=model).text(prompt, max_tokens=8, temperature=0, ignore_eos=True) == want
