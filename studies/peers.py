"""Other libraries' models of the same shape, called like ours: (ids, targets) -> (None, loss)."""

import sys
from importlib import util

import torch
from torch import nn
from torch.nn import functional as F

from convert import FIELDS


class Peer(nn.Module):
    """Another library's model, and a function of (model, ids, targets) that gives its mean loss."""

    def __init__(self, model, loss):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, ids, targets):
        return None, self.loss(self.model, ids, targets.contiguous())


def make_llama(config):
    """The LlamaForCausalLM of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    shape["num_key_value_heads"] = config.n_kv_heads or config.n_heads
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
    llama_config = LlamaConfig(
        **shape, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa"
    )
    return LlamaForCausalLM(llama_config)


def llama_loss(model, ids, targets):
    return model(ids, labels=targets, shift_labels=targets, use_cache=False).loss


def make_litgpt(config):
    """The GPT of litgpt, as a Llama."""
    import litgpt

    litgpt_config = litgpt.Config(
        block_size=config.max_seq_len,
        n_layer=config.n_layers,
        n_embd=config.d_model,
        n_head=config.n_heads,
        intermediate_size=config.d_ff,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        norm_class_name="RMSNorm",
        bias=False,
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    model = litgpt.GPT(litgpt_config)
    return model.apply(model._init_weights)


def litgpt_loss(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def make_nanogpt(config, path):
    """The GPT in nanoGPT's own model.py: whatever d_ff is, it has a GELU of 4 d_model, learned
    positions and a tied head."""
    spec = util.spec_from_file_location("nanogpt", path)
    nanogpt = util.module_from_spec(spec)
    sys.modules["nanogpt"] = nanogpt
    spec.loader.exec_module(nanogpt)
    nanogpt_config = nanogpt.GPTConfig(
        block_size=config.max_seq_len,
        vocab_size=config.vocab_size,
        n_layer=config.n_layers,
        n_head=config.n_heads,
        n_embd=config.d_model,
        dropout=0.0,
        bias=False,
    )
    return nanogpt.GPT(nanogpt_config)


def nanogpt_loss(model, ids, targets):
    return model(ids, targets)[1]


def make_peer(name, config, nanogpt_file=None):
    """The Peer called llama, litgpt or nanogpt, of the shape of a ModelConfig."""
    if name == "llama":
        return Peer(make_llama(config), llama_loss)
    if name == "litgpt":
        return Peer(make_litgpt(config), litgpt_loss)
    return Peer(make_nanogpt(config, nanogpt_file), nanogpt_loss)


def llama_continuation(model, prompt, new_tokens):
    """The greedy continuation of a prompt (1, T) by a LlamaForCausalLM, a list of ids."""
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return ids[0, prompt.shape[1] :].tolist()
