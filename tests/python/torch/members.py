"""Ranks of a test: processes with torchrun's variables, or without a launcher one."""
import datetime
import os
import tempfile
import unittest

import torch
import torch.distributed as dist

import tandem.torch

TIMEOUT = datetime.timedelta(seconds=60)


class OnRanks(unittest.TestCase):
    """Test case in a default group of gloo, with tandem's kernels for PyTorch's operators."""

    @classmethod
    def setUpClass(cls):
        if not dist.is_initialized():
            if "RANK" in os.environ:
                dist.init_process_group("gloo", timeout=TIMEOUT)
            else:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.rank, cls.size = dist.get_rank(), dist.get_world_size()
        cls.group = dist.group.WORLD

    def setUp(self):
        dist.barrier()
        torch.manual_seed(7)  # equal on all ranks
        tandem.torch.enable(compare=False)

    def tearDown(self):
        tandem.torch.disable()

    def shard(self, whole, dim=0):
        return whole.chunk(self.size, dim)[self.rank].contiguous()


def temporary_folder():
    """A folder that all ranks of this host use."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path, 0)
    return path[0]
