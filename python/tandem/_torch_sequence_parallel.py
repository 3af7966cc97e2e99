"""Gradients of parameters that every rank has and uses for its own tokens only, such as gains of norms between
sequence-parallel layers."""
from typing import Iterator, List, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from . import _api
from ._core import Comm
from ._errors import InvalidArgument

AnyModule = TypeVar("AnyModule", bound=Module)

MAX_ELEMENTS = 1 << 22  # of gradients that travel together


def mark(module: AnyModule, owners: Tuple[type, ...]) -> AnyModule:
    """Sets `sequence_parallel` on module's parameters, but for those of `owners` and those that have it."""
    if isinstance(module, owners):
        return module
    for parameter in module.parameters(recurse=False):
        if not hasattr(parameter, "sequence_parallel"):
            parameter.sequence_parallel = True
    for child in module.children():
        mark(child, owners)
    return module


def _gradients(module: Module) -> List[Tensor]:
    marked, found = False, []
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "sequence_parallel", False):
            continue
        marked = True
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise InvalidArgument(f"gradient of {name}: {parameter.grad.layout}: expected torch.strided")
        found.append(parameter.grad)
    if not marked:
        raise InvalidArgument(f"{type(module).__name__}: no parameter has sequence_parallel = True: expected "
                              "mark_sequence_parallel(module) first; copy.deepcopy leaves marks out")
    return found


def _buckets(gradients: List[Tensor]) -> Iterator[List[Tensor]]:
    bucket: List[Tensor] = []
    for gradient in gradients:
        if bucket and sum(each.numel() for each in bucket) + gradient.numel() > MAX_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@torch.no_grad()
def sum_gradients(comm: Comm, module: Module) -> None:
    for bucket in _buckets(_gradients(module)):
        message = torch.cat([gradient.reshape(-1).float() for gradient in bucket])
        summed = _api.all_reduce(comm, message).split([gradient.numel() for gradient in bucket])
        for gradient, whole in zip(bucket, summed):
            gradient.copy_(whole.view_as(gradient))
