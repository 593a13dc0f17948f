"""Writes checkpoint files of random weights as converters do."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def random_state(config, dtype=torch.float32):
    checkpoint = RandomCheckpoint(config)
    return {name: checkpoint.read(name).to(dtype) for name in checkpoint.tensors}


def write_folder(folder, state, kind="safetensors", shards=1):
    """Writes a checkpoint folder of the tiny LLaMA; several shards get the tensors in turn."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    stem, ending = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    save = save_file if kind == "safetensors" else torch.save
    if shards == 1:
        save(state, folder / f"{stem}.{ending}")
        return folder
    weight_map = {}
    for shard in range(shards):
        part = {name: tensor for i, (name, tensor) in enumerate(state.items()) if i % shards == shard}
        file = f"{stem}-{shard + 1:05}-of-{shards:05}.{ending}"
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_chat_model(folder):
    """Writes a folder with a tiny random LLaMA, a tokenizer of single bytes and a chat template."""
    write_folder(folder, random_state(PRESETS["tiny-llama"]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "</s>"}))
    return folder
