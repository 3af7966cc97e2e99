"""Receipts of PyTorch's fused operators, tandem's layers and compiled graphs: requested form, form
that ran and the reason."""
import os
import sys
import threading
import weakref
from typing import Any, Dict, List, NamedTuple, Optional

from .._errors import Unsupported
from . import _graphs

OVERLAPPED, SERIAL, TORCH = "overlapped", "serial", "torch"


class Choice(NamedTuple):
    """Form that a call takes. why: reason if it is not overlapped. speedup: time of the fastest
    alternative over that of the chosen form; None if they were not compared."""

    ran: str
    why: str = ""
    speedup: Optional[float] = None


class Receipt:
    """Row of the report: an operator, a shape and a form, with the number of its calls."""

    __slots__ = ("op", "shape", "dtype", "group", "asked", "choice", "calls")

    def __init__(self, op: str, shape: str, dtype: str, group: int, choice: Choice, asked: str) -> None:
        self.op, self.shape, self.dtype, self.group = op, shape, dtype, group
        self.asked, self.choice, self.calls = asked, choice, 0

    def count(self) -> None:
        """Counts a call, in the report's row that is equal but for its calls."""
        key = (self.op, self.shape, self.dtype, self.group, self.asked, self.choice)
        with _lock:
            _receipts.setdefault(key, self).calls += 1

    def row(self) -> Dict[str, Any]:
        speedup = self.choice.speedup
        return {"op": self.op, "shape": self.shape, "dtype": self.dtype, "group": self.group, "asked": self.asked,
                "ran": self.choice.ran, "why": self.choice.why, "calls": self.calls,
                "speedup": None if speedup is None else round(speedup, 3)}


_receipts: Dict[Any, Receipt] = {}
_lock = threading.Lock()


def is_strict(requested: bool) -> bool:
    """True if `strict=True` or TANDEM_STRICT=1."""
    return requested or os.environ.get("TANDEM_STRICT", "0") not in ("", "0")


def receipt_of(op: str, shape: str, dtype: str, group: int, choice: Choice, strict: bool,
               asked: str = OVERLAPPED) -> Receipt:
    """The receipt of that row. Raises Unsupported, before anything runs, if `strict` and overlap was
    requested and is not what would run. asked: 'serial' for a collective without a product, whose
    form is only a question of time."""
    receipt = Receipt(op, shape, dtype, group, choice, asked)
    _require_as_asked(receipt, strict)
    return receipt


def _require_as_asked(receipt: Receipt, strict: bool) -> None:
    choice = receipt.choice
    if receipt.asked == OVERLAPPED != choice.ran and is_strict(strict):
        raise Unsupported(f"{receipt.op}: {receipt.shape}, {receipt.dtype}, {receipt.group} ranks: would run as "
                          f"{choice.ran}: {choice.why}: expected {OVERLAPPED}, as strict requests")


_of_operators: "weakref.WeakKeyDictionary[Any, List[Receipt]]" = weakref.WeakKeyDictionary()
_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def _receipts_of(op: Any) -> List[Receipt]:
    """Receipts of the passes of one of tandem's operators or layers, named after its class."""
    rows = op.receipts if hasattr(op, "receipts") else [op.receipt]
    made = []
    for row, suffix in zip(rows, ("", " backward")):
        dtype = row["dtype"]
        shape = " ".join(word for word in row["shape"].split() if word != dtype)
        choice = Choice(row["ran"], row["why"], row["speedup"])
        made.append(Receipt(type(op).__name__ + suffix, shape, _NAMES.get(dtype, dtype), row["group"], choice,
                            SERIAL if row["asked"] == SERIAL else OVERLAPPED))
    return made


def count_call(op: Any, is_backward: bool = False) -> None:
    """Counts a call that is about to be made of one of tandem's operators, or of a pass of one of its
    layers. Raises Unsupported if strict, as receipt_of does."""
    receipts = _of_operators.get(op)
    if receipts is None:
        receipts = _of_operators[op] = _receipts_of(op)
    for receipt in receipts[1:] if is_backward else receipts[:1]:  # without one the call raises
        _require_as_asked(receipt, False)
        receipt.count()


def clear() -> None:
    with _lock:
        for receipt in _receipts.values():
            receipt.calls = 0
        _receipts.clear()
    _graphs.clear()


def report() -> List[Dict[str, Any]]:
    """What ran in this process, since it began or since `disable`: a list of {"op", "shape", "dtype",
    "group" (ranks), "asked", "ran", "why", "calls", "speedup"}, whose op is

    - one of PyTorch's fused operators, such as 'fused_all_gather_matmul', or the name of a framework's
      layer that tandem runs, since `enable`;
    - the class of an operator, or of a layer's pass, that tandem.torch's layers and functions call:
      'AgGemm', 'GemmRs', 'GemmAr', 'AgWgrad', 'MoeLayer', 'ContextAttention', 'CrossAttention',
      'MoeLayer backward' and so on;
    - 'torch.compile all_gather_matmul' or 'torch.compile matmul_reduce_scatter', also of scaled
      products: a gather next to the product that reads it, or a product next to the scatter of its
      sums, in graphs that Inductor compiled since `enable`.

    ran: 'overlapped', 'serial' (one after the other on tandem), 'torch' (the framework's code), or
    in compiled graphs 'fused' (the graph calls a fused operator, which has a row of its own) or
    'torch' (left alone, for the reason `why`). calls: those that the host made, of all ranks that are
    threads of this process; a CUDA graph's replays are none; of compiled graphs the number of places.
    speedup: time of the fastest alternative over that of the form that ran, None if not
    measured. Other products and collectives have no row."""
    with _lock:
        rows = [receipt.row() for receipt in _receipts.values()]
    return rows + _graphs.rows()


NO_CALL = "no call of PyTorch's fused operators or of tandem's layers"
COLUMNS = ("op", "shape", "dtype", "group", "ran", "calls", "speedup", "why")


def table(rows: List[Dict[str, Any]]) -> str:
    """The rows as text."""
    cells = [COLUMNS] + [tuple("" if row[name] is None else str(row[name]) for name in COLUMNS) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def print_report(rank: int) -> None:
    """Prints the table to stderr, on rank 0."""
    if rank != 0:
        return
    rows = report()
    text = table(rows) if rows else NO_CALL
    print(f"tandem.torch, rank 0:\n{text}", file=sys.stderr, flush=True)
