# The paper's run; all else is a default of train.py. The three differ in the last line alone.
# 2 GPUs x 8 sequences x 2048 tokens x 8 micro-steps = 262,144 targets per update
# 381,470 updates x 262,144 targets = 100,000,071,680 targets
input_layer = "binary16"  # the 16 bits of the token id, tiled 128 times; nothing trainable
