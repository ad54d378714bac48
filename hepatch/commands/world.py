"""A process group of one: what DeepSpeed wants, without a launcher, a port or a compiled op."""

from __future__ import annotations

import os

import deepspeed
import torch


def join_world_of_one(*, cuda: bool) -> None:
    """Makes this process the only one of its group; nothing where a group exists.

    Args:
        cuda: whether tensors are on a GPU.
    """
    if torch.distributed.is_initialized():
        return
    if not cuda:
        # DeepSpeed would compile its shared-memory collectives for 45 s, under a name that its releases share. One
        # process has no use for them. Source: deepspeed.comm.torch.build_shm_op.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asserts that a launcher set this one, and here the command is the launcher.
    # Source: deepspeed.runtime.engine.DeepSpeedEngine._do_args_sanity_check.
    os.environ.setdefault("LOCAL_RANK", "0")  # noqa: TID251
    # A store in this process needs no port and no further variable, and DeepSpeed takes over the group that it finds.
    # Source: deepspeed.comm.comm.init_distributed.
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
