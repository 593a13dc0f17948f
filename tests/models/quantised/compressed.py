"""Writes tiny models that the compressed-tensors library packs."""

import warnings

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_convert_from_mx_exp

warnings.filterwarnings("ignore", module="compressed_tensors")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def group(format=None, targets=("Linear",), **args):
    """A config group: args of the weights."""
    return QuantizationScheme(targets=list(targets), weights=QuantizationArgs(**args), format=format)


def write_compressed(folder, groups, ignore=("lm_head",), model=None):
    """Quantises, packs and saves a model. Returns it after the library has unpacked it. None: a random LLaMA."""
    torch.manual_seed(3)
    if model is None:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SIZES), attn_implementation="eager"
        )
    model = model.float().eval()
    config = QuantizationConfig(config_groups={f"group_{i}": each for i, each in enumerate(groups)}, ignore=[*ignore])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module, module.quantization_scheme.weights)
    packer = ModelCompressor.from_pretrained_model(model)
    packer.compress_model(model)
    model.save_pretrained(folder)
    packer.update_config(folder)
    packer.decompress_model(model)
    return model


def _calibrate(module, args):
    weight = module.weight.data
    rows, columns = weight.shape
    strategy = getattr(args.strategy, "value", args.strategy)
    if strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        parts = padded.view(padded.shape[0] // height, height, -1, width).transpose(1, 2).flatten(2)
    elif strategy == "tensor":
        parts = weight.view(1, -1)
    else:
        parts = weight.view(rows, -1, args.group_size or columns)
    low, high = parts.amin(-1), parts.amax(-1)
    tensor_wide = None
    if strategy == "tensor_group":
        tensor_wide = generate_gparam(low.amin(), high.amax())
        module.weight_global_scale.data = tensor_wide.view(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=tensor_wide)
    module.weight_scale.data = maybe_convert_from_mx_exp(args, scale).view(module.weight_scale.shape).float()
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.view(module.weight_zero_point.shape).to(module.weight_zero_point.dtype)
