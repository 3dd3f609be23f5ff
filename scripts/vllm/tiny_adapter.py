"""Writes a LoRA adapter of random weights for a model of tiny_model.py. Runs in the engine's own venv.

    tiny_adapter.py MODEL_DIR OUT_DIR --seed N
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file

RANK = 8


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model", type=pathlib.Path)
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--seed", type=int, required=True)
    arguments = arguments.parse_args()
    shape = json.loads((arguments.model / "config.json").read_text())
    inside, outside = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    generator = torch.Generator().manual_seed(arguments.seed)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, inside, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(outside, RANK, generator=generator)
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "bias": "none"}
    config |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}
    (arguments.out / "adapter_config.json").write_text(json.dumps(config))
    # Last, so that a run that was cut short leaves nothing that looks complete.
    save_file(weights, arguments.out / "adapter_model.safetensors")


main()
