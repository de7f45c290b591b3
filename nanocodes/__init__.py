"""What is not the paper: files, devices, ranks, data on disk, scoring, reports. One subject a file.

The scripts at the top level import from here; nothing in here imports from them.
"""
