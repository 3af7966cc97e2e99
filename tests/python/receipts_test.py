"""Receipts of operators, and strict operators. With TANDEM_TUNE=0, `automatic` is serial unless times are known."""
import os
import unittest

import numpy as np

import tandem
from ranks import on_ranks, values

KEYS = {"op", "shape", "dtype", "group", "asked", "ran", "candidate", "why", "calls", "speedup"}
MEASURES = os.environ.get("TANDEM_TUNE") != "0"


def without_calls(row):
    return {key: value for key, value in row.items() if key != "calls"}


class Receipts(unittest.TestCase):
    def test_of_an_operator(self):
        def body(comm):
            x, weight = values((12, 7), 1), values((5, 7), 2)
            for strategy in ("automatic", "serial", "overlapped"):
                op = tandem.GemmRs(comm, 12, 5, 7, strategy=strategy)
                self.assertEqual(op.receipt["calls"], 0)
                for _ in range(3):
                    op(x, weight)
                row = op.receipt
                self.assertEqual(set(row), KEYS)
                self.assertEqual((row["op"], row["shape"], row["dtype"]), ("gemm_rs", "m 12 n 5 k 7 f32", "f32"))
                self.assertEqual((row["group"], row["asked"], row["calls"]), (comm.size, strategy, 3))
                if strategy != "automatic":
                    overlaps = strategy == "overlapped" and comm.size > 1
                    self.assertEqual(row["ran"], "overlapped" if overlaps else "serial")
                    self.assertIsNone(row["speedup"])
                self.assertEqual(bool(row["why"]), row["ran"] == "serial" and strategy != "serial")
                self.assertTrue(row["candidate"].startswith(op.strategy))
                [listed] = [each for each in tandem.receipts() if without_calls(each) == without_calls(row)]
                self.assertGreaterEqual(listed["calls"], 3)

        on_ranks(body)

    def test_of_experts_and_attention(self):
        def body(comm):
            layer = tandem.MoeLayer(comm, 4, 24, 8, comm.size, strategy="overlapped")
            experts, weights = np.zeros((4, 1), "i4"), np.ones((4, 1), "f4")
            out, batch = layer.forward(values((4, 24), 1), experts, weights, values((16, 24), 2), values((24, 8), 3))
            attention = tandem.ContextAttention(comm, 10, 2, 6, form="gather", backward=False)
            count = sum(length for _, length in tandem.context_chunks(10, comm.size, comm.rank))
            attention.forward(*(values((count, 12), i) for i in range(3)))
            # The thread may have run other tests.
            ran = {row["op"]: (row["asked"], row["ran"]) for row in tandem.receipts()
                   if "hidden 24 " in row["shape"] or "seq 10 " in row["shape"]}
            self.assertEqual(ran["moe"], ("overlapped", "overlapped" if comm.size > 1 else "serial"))
            self.assertEqual(ran["context_attention"], ("serial", "serial"))
            self.assertNotIn("moe backward", ran)

        on_ranks(body)

    def test_strict_refuses_on_all_ranks(self):
        def body(comm):
            def make(op, **options):
                return op(comm, 12, 5, 7, strict=True, **options)

            for op in (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, tandem.AgWgrad):
                make(op, strategy="serial")
                if not MEASURES and op(comm, 12, 5, 7).receipt["ran"] == "serial":
                    with self.assertRaisesRegex(tandem.Unsupported, "automatic would run as serial: .*strict requests$"):
                        make(op)
                if comm.size > 1:
                    self.assertEqual(make(op, strategy="overlapped").receipt["ran"], "overlapped")
                    continue
                with self.assertRaisesRegex(tandem.Unsupported, "1 rank: overlapped would run as serial: a group of 1 "):
                    make(op, strategy="overlapped")
            experts = dict(tokens=4, hidden=8, ffn=8, experts=comm.size, strategy="overlapped", strict=True)
            heads = dict(seq=8, heads=2, head_dim=4, strategy="overlapped", strict=True)
            for layer, options in ((tandem.MoeLayer, experts), (tandem.ContextAttention, heads)):
                if comm.size > 1:
                    layer(comm, **options)
                    continue
                with self.assertRaisesRegex(tandem.Unsupported, "a group of 1 rank has nothing to overlap"):
                    layer(comm, **options)

        on_ranks(body)

    def test_ranks_agree_on_strict(self):
        def body(comm):
            if comm.size > 1:
                with self.assertRaises(tandem.Mismatch):
                    tandem.AgGemm(comm, 12, 5, 7, strategy="overlapped", strict=comm.rank == 0)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
