"""Test double."""
import torch
import torch.distributed as dist


class DeviceCommunicatorBase:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        self.device = device or torch.device("cpu")
        self.cpu_group = cpu_group
        self.device_group = device_group
        self.unique_name = unique_name
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)

    def all_reduce(self, input_):
        raise NotImplementedError
