#!/usr/bin/env bash
# release: transformers 5.23.0, gguf 0.19.0
# finding: The scaling of rotary frequencies in a GGUF file (linear or yarn, with factor and original length) is not read: the config says "default", the frequencies are unscaled, and no message says so. Base and context length are read.
# guess: All of the file's rotary settings are in config.rope_parameters.
# matters: A long-context model that is read from GGUF to be fine-tuned or evaluated has other frequencies than in llama.cpp, at every position but the first.
# instead: Set config.rope_parameters from the file's metadata, and pass it as config=.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile \
    transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import gguf
import numpy as np
from transformers import AutoModelForCausalLM

ROWS, WIDTH, HEADS, INNER = 64, 32, 4, 64
KINDS = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}


def write(path, scaling):
    """A Llama of one layer, of ones, whose context of 32 is extended four times."""
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(1)
    file.add_context_length(128)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(ROWS)
    file.add_rope_freq_base(500_000.0)
    if scaling:
        file.add_rope_scaling_type(KINDS[scaling])
        file.add_rope_scaling_factor(4.0)
        file.add_rope_scaling_orig_ctx_len(32)
    square, wide, tall = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    sizes = {
        "attn_norm": (WIDTH,), "attn_q": square, "attn_k": square, "attn_v": square,
        "attn_output": square, "ffn_norm": (WIDTH,), "ffn_gate": wide, "ffn_up": wide,
        "ffn_down": tall,
    }
    sizes = {f"blk.0.{name}": size for name, size in sizes.items()}
    for name, size in {"token_embd": (ROWS, WIDTH), "output_norm": (WIDTH,), **sizes}.items():
        file.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


found = {}
for scaling in (None, "linear", "yarn"):
    write(f"{scaling}.gguf", scaling)
    fields = gguf.GGUFReader(f"{scaling}.gguf").fields
    written = {name: fields[name].contents() for name in fields if "rope" in name}
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{scaling}.gguf")
    found[scaling] = model.config.rope_parameters, model.model.rotary_emb.inv_freq.tolist()
    print(f"{scaling}: the file has {written}")
    print(f"  the config has {found[scaling][0]}, {model.config.max_position_embeddings} positions")
    assert model.config.max_position_embeddings == 128
assert found[None] == found["linear"] == found["yarn"], found
assert found[None][0] == {"rope_theta": 500_000.0, "rope_type": "default"}, found
PROGRAM
echo "As found: the scaling of a GGUF file is not read."
