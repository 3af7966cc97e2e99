"""Receipts of PyTorch's fused operators: requested form, form that ran and the reason."""
import os
import sys
import threading
from typing import Any, Dict, List, NamedTuple, Optional

from .._errors import Unsupported

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
    if asked == OVERLAPPED != choice.ran and is_strict(strict):
        raise Unsupported(f"{op}: {shape}, {dtype}, {group} ranks: would run as {choice.ran}: {choice.why}: expected "
                          f"{OVERLAPPED}, as strict requests")
    key = (op, shape, dtype, group, choice)
    with _lock:
        return _receipts.setdefault(key, Receipt(op, shape, dtype, group, choice, asked))


def clear() -> None:
    with _lock:
        _receipts.clear()


def report() -> List[Dict[str, Any]]:
    """What PyTorch's fused operators ran as in this process since `enable`: a list of {"op",
    "shape", "dtype", "group" (ranks), "asked", "ran", "why", "calls", "speedup"}. ran: 'overlapped',
    'serial' (tandem's operators one after the other) or 'torch' (PyTorch's kernel). calls: those that
    the host made; a CUDA graph's replays are none. speedup: time of the fastest alternative over that
    of the form that ran, None if not measured. A product that a program or compiler did not hand to
    these operators makes no call, and no row."""
    with _lock:
        return [receipt.row() for receipt in _receipts.values() if receipt.calls]


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
    text = table(rows) if rows else "no call of PyTorch's fused operators"
    print(f"tandem.torch, rank 0:\n{text}", file=sys.stderr, flush=True)
