"""Gradients of replicated parameters that each rank uses for its own tokens only, such as gains of
norms between sequence-parallel layers."""
from typing import Iterator, List, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .. import _api
from .._core import Comm
from .._errors import InvalidArgument

AnyModule = TypeVar("AnyModule", bound=Module)

MAX_ELEMENTS = 1 << 22  # gradients sent together


def _outside(module: Module, owners: Tuple[type, ...], prefix: str = "") -> Iterator[Tuple[str, Parameter]]:
    """Parameters of module by name, except those of modules of the types `owners`."""
    if isinstance(module, owners):
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        yield from _outside(child, owners, f"{prefix}{name}.")


def mark(module: AnyModule, owners: Tuple[type, ...]) -> AnyModule:
    for _, parameter in _outside(module, owners):
        if not hasattr(parameter, "sequence_parallel"):
            parameter.sequence_parallel = True
    return module


def _gradients(module: Module, owners: Tuple[type, ...]) -> List[Tensor]:
    found = {}
    for name, parameter in _outside(module, owners):
        if not hasattr(parameter, "sequence_parallel"):
            raise InvalidArgument(f"{name}: no sequence_parallel: expected mark_sequence_parallel(module) once the "
                                  "module is complete, as copy.deepcopy leaves marks out, or False")
        gradient = parameter.grad
        if not parameter.sequence_parallel or gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise InvalidArgument(f"gradient of {name}: {gradient.layout}: expected torch.strided")
        found[id(parameter)] = gradient
    return list(found.values())


def _buckets(gradients: List[Tensor]) -> Iterator[List[Tensor]]:
    """Yields at least one bucket, so that a rank without gradients is detected."""
    bucket: List[Tensor] = []
    for gradient in gradients:
        if bucket and sum(each.numel() for each in bucket) + gradient.numel() > MAX_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(gradient)
    yield bucket


@torch.no_grad()
def sum_gradients(comm: Comm, module: Module, owners: Tuple[type, ...]) -> None:
    for bucket in _buckets(_gradients(module, owners)):
        message = torch.cat([torch.zeros(0, dtype=torch.float32, device=comm.device),
                             *(each.reshape(-1).float() for each in bucket)])
        summed = _api.all_reduce(comm, message).split([gradient.numel() for gradient in bucket])
        for gradient, whole in zip(bucket, summed):
            gradient.copy_(whole.view_as(gradient))
