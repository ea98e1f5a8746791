"""Models of the engine's tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 1000


def tiny_llama(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LlamaForCausalLM:
    """Return a random two-layer Llama with two query heads per KV head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(device, dtype)


def generate(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Return transformers' own greedy continuation, its end-of-sequence token included."""
    model.set_attn_implementation("sdpa")
    tokens = torch.tensor([prompt], device=model.device)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
