"""dequantise_gguf.py IN.gguf OUT.gguf: the same metadata and tokenizer, every tensor as F32."""

import sys
from pathlib import Path

import gguf
import numpy as np


def dequantise(src, dst):
    reader = gguf.GGUFReader(src)
    arch = reader.fields["general.architecture"].contents()
    tmp = Path(f"{dst}.tmp")
    w = gguf.GGUFWriter(tmp, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.alignment"):
            continue  # the writer's own
        value, kind = field.contents(), field.types[0]
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        w.add_key_value(field.name, value, kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for t in reader.tensors:
        shape = [int(n) for n in reversed(t.shape)]
        w.add_tensor_info(t.name, shape, np.dtype(np.float32), 4 * int(t.n_elements))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for t in reader.tensors:
        # The package's own arithmetic; F32 tensors pass unchanged.
        w.write_tensor_data(gguf.dequantize(t.data, t.tensor_type).astype(np.float32, copy=False))
    w.close()
    tmp.replace(dst)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    dequantise(sys.argv[1], sys.argv[2])
