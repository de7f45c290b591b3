"""The processes of torchrun: joining them, and letting rank 0 act for all."""

import os

import torch.distributed as dist


def rank_and_world():
    """This process's rank and the number of processes that have joined."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def join_ranks(device):
    """Join the other processes of torchrun, if there are any; returns rank_and_world()."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank_and_world()


def leave_ranks():
    """Leave the other processes, if this one has joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def from_rank_0(function, *arguments):
    """Call a function on rank 0 alone. Every rank returns what it returned there, or raises the
    ValueError or OSError that it raised there."""
    if not dist.is_initialized():
        return function(*arguments)
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [function(*arguments)]
        except (ValueError, OSError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
