"""Collectives next to products in the graphs that Inductor compiles: those that its asynchronous
tensor parallelism replaced by a fused operator, and those that it left alone, with the reason.

Counts are kept in Inductor's own counters, which a graph from its cache restores.
"""
import json
import math
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.fx import Graph, Node

from .._errors import Unsupported

FUSED, LEFT = "fused", "torch"
PREFIX = "tandem "  # of a counter's name; JSON of a Place follows
GATHER, SCATTER = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default"
LAYOUT = ("_c10d_functional.wait_tensor.default", "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default",
          "aten.cat.default", "aten.slice.Tensor", "aten.view.default", "aten.reshape.default",
          "aten._unsafe_view.default", "aten.view.dtype", "<built-in function getitem>")
CASTS = ("prims.convert_element_type.default", "aten._to_copy.default", "aten.clone.default")
# Index of A among a product's arguments; B follows.
PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten._scaled_mm.default": 0, "aten.addmm.default": 1,
            "aten.baddbmm.default": 1}


class Place(NamedTuple):
    """A pair of a collective and a product, or of several that read one gather."""

    op: str
    shape: str
    dtype: str
    group: int
    ran: str
    why: str


class Groups(NamedTuple):
    """What `enable` says of process groups, by name. key: picklable and different for different
    answers, since compiled graphs depend on them."""

    is_enabled: Callable[[str], bool]
    is_strict: Callable[[str], bool]
    key: Callable[[], Any]


def _name(node: Any) -> str:
    return str(node.target) if isinstance(node, Node) else ""


def _argument(node: Node, index: int, name: str) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _operand(product: Node, index: int) -> Any:
    """A (0) or B (1) of a product."""
    at = PRODUCTS[_name(product)] + index
    return _argument(product, at, product.target._schema.arguments[at].name)  # type: ignore[union-attr]


def _value(node: Any) -> Optional[torch.Tensor]:
    if _name(node) == "prims.inductor_force_stride_order.default":
        node = node.args[0]
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _shape(a: Any, weights: List[Any], ranks: int) -> Tuple[str, str]:
    """Shape and dtype of products of A, whose rows are multiplied by `ranks`."""
    left, right = _value(a), [_value(weight) for weight in weights]
    if left is None or not right:
        return "", ""
    columns = "+".join("?" if each is None else str(each.shape[-1]) for each in right)
    m = math.prod(left.shape[:-1]) * ranks
    return f"m {m} n {columns} k {left.shape[-1]}", str(left.dtype).replace("torch.", "")


class _Found(NamedTuple):
    """Products next to a collective, and why they are not fused, as far as the nodes between them
    tell."""

    products: List[Node]
    why: str = ""


def _is_last(dim: Any, node: Any) -> bool:
    value = _value(node)
    return value is not None and value.dim() > 1 and dim in (-1, value.dim() - 1)


def _readers(gather: Node) -> _Found:
    """Products whose A is the gathered tensor."""
    products: List[Node] = []
    why, seen = "", set()
    ahead = [gather]
    while ahead:
        node = ahead.pop()
        for user in node.users:
            name = _name(user)
            if name in PRODUCTS and _operand(user, 0) is node and user not in products:
                products.append(user)
            if name not in LAYOUT + CASTS or user in seen:
                continue
            seen.add(user)
            ahead.append(user)
            dim = _argument(user, 1, "dim") if name == "aten.cat.default" else None
            if _is_last(dim, user):
                why = f"gather_dim {dim} is the last"
            if name in CASTS:
                why = f"{name} is between them"
    return _Found(products, why)


def _writers(scatter: Node) -> _Found:
    """The product, or products, whose sums over ranks are scattered."""
    products: List[Node] = []
    why, seen = "", {scatter}
    behind = [scatter]
    while behind:
        for source in behind.pop().all_input_nodes:
            name = _name(source)
            if source in seen or name not in (*PRODUCTS, *LAYOUT, *CASTS):
                continue
            seen.add(source)
            (products if name in PRODUCTS else behind).append(source)
            if name in CASTS:
                why = f"{name} is between them"
    if any(user not in seen for node in seen - {scatter} for user in node.users):
        why = why or "the product has another use"
    return _Found(products, why)


def _reason(found: _Found, is_enabled: bool) -> str:
    """Reason that a pair was left alone."""
    import torch._inductor.config as config

    kind = _name(found.products[0])
    if not is_enabled:
        return "enable() was not called for the group"
    if not torch.distributed.is_nccl_available():
        return "this PyTorch has no NCCL, without which Inductor fuses nothing"
    if kind not in ("aten.mm.default", "aten._scaled_mm.default"):
        return f"the product is {kind.split('.')[1]}{', which adds' if PRODUCTS[kind] else ''}: expected mm"
    if found.why:
        return found.why
    if len({_name(each) for each in found.products}) > 1:
        return "products of several kinds read the gathered tensor"
    if config.reorder_for_compute_comm_overlap:
        return "another product may hide it (reorder_for_compute_comm_overlap)"
    return "it is none of Inductor's patterns"


def _fused_places(graph: Graph) -> Iterator[Place]:
    for node in graph.nodes:
        name = _name(node)
        if not name.startswith("symm_mem.fused_"):
            continue
        schema = [each.name for each in node.target._schema.arguments]
        group_name = _argument(node, schema.index("group_name"), "group_name")
        size = torch._C._distributed_c10d._resolve_process_group(group_name).size()
        weights = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        gathers = "all_gather" in name
        shape, dtype = _shape(node.args[0], list(weights), size if gathers else 1)
        yield Place(name.split(".")[1].replace("fused_", ""), shape, dtype, size, FUSED, "")


def _left_places(graph: Graph, groups: Groups) -> Iterator[Tuple[Place, str]]:
    """With the names of their groups."""
    for node in graph.nodes:
        is_gather = _name(node) == GATHER
        if not is_gather and _name(node) != SCATTER:
            continue
        found = _readers(node) if is_gather else _writers(node)
        if not found.products:
            continue
        size = int(_argument(node, 1 if is_gather else 2, "group_size"))
        group_name = str(_argument(node, 2 if is_gather else 3, "group_name"))
        shape, dtype = _shape(_operand(found.products[0], 0), [_operand(each, 1) for each in found.products], 1)
        scaled = "scaled_" if "_scaled_mm" in _name(found.products[0]) else ""
        op = f"all_gather_{scaled}matmul" if is_gather else f"{scaled}matmul_reduce_scatter"
        yield Place(op, shape, dtype, size, LEFT, _reason(found, groups.is_enabled(group_name))), group_name


def count_places(graph: Graph, groups: Groups) -> None:
    """Counts those of a graph. Raises Unsupported for one that was left alone in a strict group."""
    from torch._dynamo.utils import counters

    places = list(_fused_places(graph))
    for place, group_name in _left_places(graph, groups):
        if groups.is_enabled(group_name) and groups.is_strict(group_name):
            raise Unsupported(f"torch.compile {place.op}: {place.shape}, {place.dtype}, {place.group} ranks: left alone: "
                              f"{place.why}: expected {FUSED}, as strict requests")
        places.append(place)
    for place in places:
        counters["inductor"][PREFIX + json.dumps(place)] += 1


def install(groups: Groups) -> Callable[[], None]:
    """Counts the graphs that Inductor compiles, after a pass that the user has set. Returns a function
    that ends it."""
    import torch._inductor.config as config
    import torch._inductor.custom_graph_pass as passes

    before = config.post_grad_custom_post_pass
    takes_several = hasattr(passes, "get_custom_graph_passes")  # PyTorch 2.15

    class CountPlaces(passes.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            if before is not None and not takes_several:
                before(graph)
            count_places(graph, groups)

        def uuid(self) -> Any:
            """Key of Inductor's cache; None, without a cache, if the user's pass has none."""
            local = (passes.get_hash_for_files((__file__,)), groups.key())
            if before is None or takes_several:
                return local
            other = before.uuid() if isinstance(before, passes.CustomGraphPass) else None
            return other and (other, local)

    ours: Any = CountPlaces()
    if takes_several:
        ours = [*passes.get_custom_graph_passes(before), ours]
    config.post_grad_custom_post_pass = ours

    def undo() -> None:
        if config.post_grad_custom_post_pass is ours:
            config.post_grad_custom_post_pass = before

    return undo


def _counters() -> Any:
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters["inductor"]


def rows() -> List[Dict[str, Any]]:
    """Rows of the report."""
    counted = [(Place(*json.loads(name[len(PREFIX):])), count) for name, count in list(_counters().items())
               if name.startswith(PREFIX)]
    return [{"op": f"torch.compile {place.op}", "shape": place.shape, "dtype": place.dtype, "group": place.group,
             "asked": "overlapped", "ran": place.ran, "why": place.why, "calls": count, "speedup": None}
            for place, count in counted]


def clear() -> None:
    counters = _counters()
    for name in [name for name in counters if name.startswith(PREFIX)]:
        del counters[name]
