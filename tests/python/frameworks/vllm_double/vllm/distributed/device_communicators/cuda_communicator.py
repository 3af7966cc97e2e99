"""Test double."""
import torch.distributed as dist

from .base_device_communicator import DeviceCommunicatorBase


class CudaCommunicator(DeviceCommunicatorBase):
    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        super().__init__(cpu_group, device, device_group, unique_name)
        self.stock_calls = 0

    def all_reduce(self, input_):
        """vLLM's custom all-reduce, quick reduce or NCCL: out of place."""
        self.stock_calls += 1
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out
