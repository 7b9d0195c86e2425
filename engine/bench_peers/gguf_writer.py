"""A Hugging Face folder of a Llama in bfloat16 as a GGUF file. Run by an environment that has ``gguf``; it imports
nothing of this project. ``python gguf_writer.py FOLDER FILE``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(path: Path) -> dict[str, Any]:
    """Name to the bits of bfloat16 tensors, uint16."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}, not BF16")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[start:stop], np.uint16).reshape(entry["shape"])
    return found


def interleaved(matrix: Any, heads: int) -> Any:
    """Rows of a projection in llama.cpp's order: rotated pairs are neighbours there, and halves of a head here."""
    rows, inputs = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def target_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def main(folder: Path, target: Path) -> None:
    import gguf  # type: ignore[import-not-found] # noqa: PLC0415 - only the peer's environment has it

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for _, index in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in tensors(folder / "model.safetensors").items():
        rotated = next((number for part, number in heads.items() if part in name), None)
        array = bits if rotated is None else np.ascontiguousarray(interleaved(bits, rotated))
        if array.ndim == 1:  # norms are float32 there
            writer.add_tensor(target_name(name), (array.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = array.view(np.uint8).reshape(array.shape[0], -1)
            writer.add_tensor(target_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
