# The paper's run with an input of ours; all else is a default of train.py.
# 2 GPUs x 8 sequences x 2048 tokens x 8 micro-steps = 262,144 targets per update
# 381,470 updates x 262,144 targets = 100,000,071,680 targets
input_layer = "wide2048"  # gf2 with 2048 bits in place of 16: fixed, untiled, nothing trainable
