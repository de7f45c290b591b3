# The paper's run with an input of ours; all else is a default of train.py.
# 2 GPUs x 8 sequences x 2048 tokens x 8 micro-steps = 262,144 targets per update
# 381,470 updates x 262,144 targets = 100,000,071,680 targets
input_layer = "signs2048"  # 2048 bits of each id as -0.02 and 0.02: untiled, nothing trainable
