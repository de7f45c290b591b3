# Laid over one of the three: about two minutes on two CPU cores.
# 16 sequences x 256 tokens x 1 micro-step x 1 rank = 4,096 targets per update
# 300 updates x 4,096 targets = 1,228,800 targets
data = "data/stdlib"
vocab_size = 8192
d_model = 256
n_layers = 4
n_heads = 4
d_ff = 1024
max_seq_len = 256

max_updates = 300
targets_per_update = 4096
micro_batch = 16
lr = 1e-3
min_lr = 1e-4
warmup_updates = 30

eval_interval = 50
eval_windows = 128
save_interval = 100
compile = False  # needs no C++ compiler
