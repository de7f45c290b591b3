# Laid over one of the three: the size of GPT-2 small, for one GPU.
# 1 GPU x 32 sequences x 1024 tokens x 8 micro-steps = 262,144 targets per update
# 10,000 updates x 262,144 targets = 2,621,440,000 targets
d_model = 768
n_layers = 12
n_heads = 12
d_ff = 2048
max_seq_len = 1024

max_updates = 10_000
micro_batch = 32
lr = 6e-4
min_lr = 6e-5
warmup_updates = 500
