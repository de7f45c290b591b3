"""What a run will cost, from its config alone: parameters, FLOPs, time, memory and disk."""

from nanocodes.head_loss import LOGITS_AT_ONCE

H100_FLOPS = 989e12  # per second, dense bfloat16
ASSUMED_MFU = 0.4  # model FLOPs over what the device could make
GIB = 2**30


def parameter_counts(model):
    """How many parameters the input, the backbone and the head have."""
    counts = {"input": 0, "backbone": 0, "head": 0}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        counts[part if part in counts else "backbone"] += parameter.numel()
    return counts


def flops_per_target(model):
    """FLOPs of one training target at full context: 2 forward and 4 backward for each weight of
    a matrix, and the causal half of attention. The input is looked up, not multiplied."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    weights -= parameter_counts(model)["input"]
    attention = config.n_layers * config.max_seq_len * config.d_model
    return 6 * (weights + attention)


def activation_bytes(config):
    """What is kept of one micro-step for its backward pass, roughly."""
    # For each position and block: in float32 the inputs of the norms; in bfloat16 their outputs,
    # q, k, v, q and k rotated, attention, and four of d_ff.
    block = 24 * config.d_model + 8 * config.d_ff
    if config.checkpoint_activations:
        block = 4 * config.d_model + block / config.n_layers
    return block * config.n_layers * config.micro_batch * config.max_seq_len


def plan(model, config, world, micro_steps):
    """The run in numbers, a page of text. The model may be on "meta"."""
    counts = parameter_counts(model)
    parameters = sum(counts.values())
    groups = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    targets = config.max_updates * config.targets_per_update
    flops = flops_per_target(model)
    days = targets * flops / (H100_FLOPS * ASSUMED_MFU) / 86_400
    logits = min(LOGITS_AT_ONCE, config.micro_batch * config.max_seq_len * config.vocab_size)
    logits_gib = (10 * logits + 6 * counts["head"]) / GIB
    return f"""input layer         {config.input_layer}
parameters          {parameters:,}: {groups}
targets per update  {config.targets_per_update:,} = {world} ranks x {micro_steps} micro-steps x \
{config.micro_batch} sequences x {config.max_seq_len}
updates             {config.max_updates:,}: {targets:,} targets in \
{targets // config.max_seq_len:,} windows
FLOPs               {flops * targets:.3e}, {flops:,} per target
days                {days:.1f} on one device, at {ASSUMED_MFU:.0%} of {H100_FLOPS / 1e12:.0f} \
TFLOP/s, an H100's
memory of a rank    {4 * parameters / GIB:.1f} GiB weights, as much gradients, twice it for AdamW;
                    roughly {activation_bytes(config) / GIB:.1f} GiB activations and \
{logits_gib:.1f} GiB logits
disk                {12 * parameters / GIB:.1f} GiB a checkpoint, {2 * targets / GIB:.1f} GiB \
shards"""
