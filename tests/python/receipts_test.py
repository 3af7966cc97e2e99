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

    def passes(self, comm, layer, ops, dtype, calls, asked="overlapped"):
        """Checks the receipts of a layer's passes, and that receipts() lists those that were called."""
        rows = layer.receipts
        self.assertEqual([row["op"] for row in rows], ops)
        self.assertEqual([row["calls"] for row in rows], calls)
        for row in rows:
            self.assertEqual(set(row), KEYS)
            self.assertEqual((row["dtype"], row["group"], row["asked"]), (dtype, comm.size, asked))
            overlaps = asked == "overlapped" and comm.size > 1
            self.assertEqual(row["ran"], "overlapped" if overlaps else "serial")
            self.assertEqual(row["why"] == "", overlaps or asked == "serial")
            listed = [each for each in tandem.receipts() if without_calls(each) == without_calls(row)]
            self.assertEqual(len(listed), 1 if row["calls"] else 0)
        return rows

    def test_of_passes_of_experts(self):
        def body(comm):
            x, w_in, w_out = values((4, 28), 1), values((16, 28), 2), values((28, 8), 3)
            layer = tandem.MoeLayer(comm, 4, 28, 8, comm.size, strategy="overlapped", backward=True)
            ops = ["moe", "moe backward"]
            self.passes(comm, layer, ops, "f32", [0, 0])
            for _ in range(2):
                out, batch = layer.forward(x, np.zeros((4, 1), "i4"), np.ones((4, 1), "f4"), w_in, w_out)
            layer.backward(batch, out, w_in, w_out)
            forward, _ = self.passes(comm, layer, ops, "f32", [2, 1])
            self.assertEqual(forward["shape"].split()[:4], ["tokens", "4", "hidden", "28"])

        on_ranks(body)

    def test_of_passes_of_attention(self):
        def body(comm):
            ops = ["context_attention", "context_attention backward"]
            count = sum(length for _, length in tandem.context_chunks(14, comm.size, comm.rank))
            q, k, v = (values((count, 12), i) for i in range(3))
            ring = tandem.ContextAttention(comm, 14, 2, 6, form="ring")
            out, sums = ring.forward(q, k, v)
            ring.backward(q, k, v, out, sums, q)
            self.passes(comm, ring, ops, "f32", [1, 1])
            gather = tandem.ContextAttention(comm, 14, 2, 6, form="gather", backward=False)
            gather.forward(q, k, v)
            self.passes(comm, gather, ops[:1], "f32", [1], "serial")

            cross = tandem.CrossAttention(comm, 6, 10, 8, 4, 2, 6, strategy="overlapped", backward=False)
            x = values((tandem.shard_of(6, comm.size, comm.rank)[1], 8), 1)
            visual = values((tandem.shard_of(10, comm.size, comm.rank)[1], 4), 2)
            cross.forward(x, visual, values((12, 8), 3), values((12, 4), 4), values((12, 4), 5), values((8, 12), 6))
            row, = self.passes(comm, cross, ops[:1], "f32", [1])
            self.assertIn("seq 6 keys 10", row["shape"])

        on_ranks(body)

    def test_of_layers_end_with_their_world(self):
        with tandem.World(1) as world:
            layer = tandem.MoeLayer(world.comm(), 4, 8, 8, 1)
            self.assertEqual(len(layer.receipts), 2)
        with self.assertRaisesRegex(tandem.InvalidArgument, "moe: .*closed"):
            layer.receipts

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
            cross = dict(text=8, visual=8, hidden=8, features=8, heads=2, head_dim=4, strategy="overlapped", strict=True)
            for layer, options in ((tandem.MoeLayer, experts), (tandem.ContextAttention, heads),
                                   (tandem.CrossAttention, cross)):
                if comm.size > 1:
                    self.assertEqual({row["ran"] for row in layer(comm, **options).receipts}, {"overlapped"})
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
