"""Writes tests/golden/dequant/<type>.bin: random blocks and what the gguf package makes of them."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from goldenio import GOLDEN, save, write_dequant

# Where the F16 scales of a block are.
SCALES = {
    T.Q4_0: [0],
    T.Q4_1: [0, 2],
    T.Q5_0: [0],
    T.Q5_1: [0, 2],
    T.Q8_0: [0],
    T.Q4_K: [0, 2],
    T.Q5_K: [0, 2],
    T.Q6_K: [208],
}

# Zero and minus zero, the smallest and largest denormal, the smallest normal, one, the largest.
EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x2E66, 0x1400]


def mxfp4_blocks(rng):
    """Every scale that leaves all values finite, with random and with extreme codes."""
    b = rng.integers(0, 256, (256 + 64, 17), dtype=np.uint8)
    b[:, 0] = np.arange(len(b)) % 252
    b[256:, 1:] = (np.arange(64) * 0x11 % 256)[:, None]
    return b


def blocks_of(kind, rng):
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    n = 256 if elems == 32 else 96
    b = rng.integers(0, 256, (n, size), dtype=np.uint8)
    at = SCALES[kind]
    scales = rng.integers(0, 0x7C00, (n, len(at)), dtype=np.uint16) | (rng.integers(0, 2, (n, len(at)), dtype=np.uint16) << 15)
    pairs = [[x] * len(at) for x in EDGES] + ([[x, y] for x in EDGES for y in EDGES] if len(at) == 2 else [])
    k = 0
    # extreme quants with ordinary and with extreme scales: all bits zero, all one, alternating
    for fill in (0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0x55):
        for scale in (0x3C00, 0x0001, 0x7BFF):
            b[k], scales[k] = fill, scale
            k += 1
    room = n - k - (n // 4)  # the rest stays random
    for i in range(min(room, len(pairs))):
        scales[k + i] = pairs[i * len(pairs) // min(room, len(pairs))]
    for j, offset in enumerate(at):
        b[:, offset : offset + 2] = scales[:, j : j + 1].astype("<u2").view(np.uint8)
    return b


def main():
    rng = np.random.default_rng(20240602)
    halves = np.arange(0x10000, dtype=np.uint32)
    f16 = halves[(halves & 0x7C00) != 0x7C00].astype("<u2")  # every finite value
    bf16 = halves[(halves & 0x7F80) != 0x7F80]
    bf16 = np.concatenate([bf16[:300], bf16[0x7F80 : 0x7F80 + 300], rng.choice(bf16, 8000)]).astype("<u2")
    for kind in (T.F16, T.BF16, *SCALES, T.MXFP4):
        elems, size = gguf.GGML_QUANT_SIZES[kind]
        if kind == T.F16:
            raw = f16.view(np.uint8).reshape(1, -1)
            want = f16.view("<f2").astype(np.float32)
        elif kind == T.BF16:
            raw = bf16.view(np.uint8).reshape(1, -1)
            want = gguf.dequantize(raw, kind)
        else:
            raw = mxfp4_blocks(rng) if kind == T.MXFP4 else blocks_of(kind, rng)
            with np.errstate(over="raise", invalid="raise"):
                want = gguf.dequantize(raw.reshape(1, -1), kind)
        want = np.ascontiguousarray(want, np.float32).reshape(-1)
        assert np.isfinite(want).all()
        write_dequant(GOLDEN / "dequant" / f"{kind.name}.bin", int(kind), elems, size, raw.tobytes(), want)


main()
