"""Writes a model that a real engine serves in seconds on a CPU: a real tokenizer and chat template, random weights.

    tiny_model.py TOKENIZER_DIR OUT_DIR --arch qwen3|llama

TOKENIZER_DIR holds tokenizer.json (or tokenizer.json.gz), tokenizer_config.json and chat_template.jinja. It says
nothing sensible, but what it says comes back as the same tokens when a client sends it in the next turn: only whole
lower-case words with a space in front, and the end of the turn, can be sampled. Runs in the engine's own venv.
"""

import argparse
import gzip
import json
import pathlib
import re
import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

# 1 KiB of KV cache per token: 2 layers x (K and V) x 2 heads x 32 x 4 bytes.
SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=16384,
    tie_word_embeddings=False,
    # Wide enough that different prompts are answered with different words.
    initializer_range=0.5,
)
ARCHITECTURES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def copy_tokenizer(source, target):
    packed = source / "tokenizer.json.gz"
    if packed.exists():
        (target / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    else:
        shutil.copy(source / "tokenizer.json", target)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, target)


def special_id(tokenizer, config, name):
    content = config.get(name)
    content = content["content"] if isinstance(content, dict) else content
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return ids.get(content)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("tokenizer", type=pathlib.Path)
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--arch", choices=ARCHITECTURES, required=True)
    arguments = arguments.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(arguments.tokenizer, arguments.out)
    tokenizer = json.loads((arguments.out / "tokenizer.json").read_text())
    config = json.loads((arguments.out / "tokenizer_config.json").read_text())

    vocabulary = tokenizer["model"]["vocab"]
    highest = max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    end = special_id(tokenizer, config, "eos_token")
    make_config, make_model = ARCHITECTURES[arguments.arch]
    torch.manual_seed(2)
    model = make_model(
        make_config(
            vocab_size=-(-(highest + 1) // 128) * 128,
            bos_token_id=special_id(tokenizer, config, "bos_token"),
            eos_token_id=end,
            pad_token_id=None,
            **SHAPE,
        )
    )
    # In byte-level vocabularies U+0120 stands for the space.
    words = [id for token, id in vocabulary.items() if re.fullmatch("\u0120[a-z]{3,}", token)]
    silent = torch.ones(model.config.vocab_size, dtype=torch.bool)
    silent[[*words, end]] = False
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    # Last, so that a run that was cut short leaves nothing that looks complete.
    model.save_pretrained(arguments.out)
    print(f"{arguments.out}: {len(words)} words, vocabulary of {model.config.vocab_size}")


main()
