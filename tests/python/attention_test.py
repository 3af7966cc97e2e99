"""Context-parallel attention and the cross-attention layer against one process in f64."""
import gc
import unittest

import numpy as np

import tandem
from ranks import frameworks, on_ranks, rank_counts, torch, values

if torch:
    from tandem import torch as layers


def positions(chunks):
    return [p for begin, count in chunks for p in range(begin, begin + count)]


def local_rows(whole, chunks):
    """This rank's rows of whole [batch, positions, columns]."""
    return np.ascontiguousarray(whole[:, positions(chunks)].reshape(-1, whole.shape[-1]))


def rotated(x, angles, sign=1):
    """x [..., positions, head_dim], rotated by angles [positions, head_dim / 2]."""
    half = x.shape[-1] // 2
    cos, sin = np.cos(angles), sign * np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def heads_of(x, heads):
    batch, rows, columns = x.shape
    return x.reshape(batch, rows, heads, columns // heads).transpose(0, 2, 1, 3).astype("f8")


def rows_again(x):
    batch, heads, rows, dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, rows, heads * dim)


def reference(q, k, v, dout, heads, kv_heads, causal, window=0, theta=0, starts=None):
    """(out, dq, dk, dv) of whole sequences [batch, positions, columns]."""
    q, k, v, dout = heads_of(q, heads), heads_of(k, kv_heads), heads_of(v, kv_heads), heads_of(dout, heads)
    batch, _, seq, dim = q.shape
    keys, group = k.shape[2], heads // kv_heads
    starts = np.zeros((batch, seq), int) if starts is None else starts
    mask = np.ones((batch, 1, seq, keys), bool)
    if causal:
        at, key = np.arange(seq)[:, None], np.arange(keys)[None]
        mask = ((key <= at) & (key >= starts[:, :, None]))[:, None]
        if window:
            mask &= key > at - window
    angles = np.zeros((batch, 1, seq, dim // 2))
    if theta:
        speeds = theta ** (-2 * np.arange(dim // 2) / dim)
        angles = ((np.arange(seq) - starts)[:, :, None] * speeds)[:, None]
        q, k = rotated(q, angles), rotated(k, angles)
    every_k, every_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.where(mask, q @ every_k.transpose(0, 1, 3, 2) / np.sqrt(dim), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ every_v
    ds = p * (dout @ every_v.transpose(0, 1, 3, 2) - (dout * out).sum(-1, keepdims=True)) / np.sqrt(dim)

    def by_group(x):
        return x.reshape(batch, kv_heads, group, keys, dim).sum(2)

    dq = ds @ every_k
    dk, dv = by_group(ds.transpose(0, 1, 3, 2) @ q), by_group(p.transpose(0, 1, 3, 2) @ dout)
    if theta:
        dq, dk = rotated(dq, angles, -1), rotated(dk, angles, -1)
    return tuple(map(rows_again, (out, dq, dk, dv)))


def generate(count):
    """Shapes from one row to several chunks a rank, causal and cross, with documents and windows."""
    chance = np.random.default_rng(3)

    def one_of(*choices):
        return choices[chance.integers(len(choices))]

    for _ in range(count):
        causal, kv_heads = one_of(True, True, False), one_of(1, 2)
        seq = one_of(1, 2, 3, 7, 16, 33)
        shape = dict(seq=seq, heads=kv_heads * one_of(1, 2), kv_heads=kv_heads, head_dim=one_of(2, 8),
                     keys=seq if causal else one_of(1, 5, 40), batch=one_of(1, 2), causal=causal,
                     contiguous=one_of(True, False), window=one_of(0, 0, 1, 6) if causal else 0,
                     rope_theta=one_of(0.0, 100.0) if causal else 0.0)
        starts = None
        if causal and one_of(True, False):  # documents shorter than a chunk, and others
            begins = chance.random((shape["batch"], seq)) < one_of(.2, .7)
            starts = np.maximum.accumulate(np.where(begins, np.arange(seq), 0), 1)
        yield shape, starts


def operands(shape):
    q = values((shape["batch"], shape["seq"], shape["heads"] * shape["head_dim"]), 1)
    k, v = (values((shape["batch"], shape["keys"], shape["kv_heads"] * shape["head_dim"]), s) for s in (2, 3))
    return q, k, v, values(q.shape, 4)


class Context(unittest.TestCase):
    def compare(self, got, want, chunks, bound, size, what):
        want = local_rows(want, chunks)
        self.assertEqual(got.shape, want.shape, what)
        if got.size:
            self.assertLessEqual(np.abs(got - want).max(), bound * size, what)

    def test_results_and_gradients(self):
        for name, make, back, dtype in frameworks():
            bound = 2e-6 if "bfloat16" not in name else 4e-2

            def body(comm):
                for shape, starts in generate(24 if name == "numpy" else 6):
                    whole = [back(make(x)) for x in operands(shape)]
                    want = reference(*whole, shape["heads"], shape["kv_heads"], shape["causal"], shape["window"],
                                     shape["rope_theta"], starts)
                    op = tandem.ContextAttention(comm, dtype=dtype, **shape)
                    at = op.query_chunks, op.key_chunks, op.key_chunks, op.query_chunks
                    q, k, v, dout = (make(local_rows(x, chunks)) for x, chunks in zip(whole, at))
                    documents = None
                    if starts is not None:
                        documents = np.ascontiguousarray(starts.reshape(1, -1), "i4")
                        documents = documents if name == "numpy" else torch.tensor(documents)
                    out, log_sums = op.forward(q, k, v, documents)
                    self.assertIs(type(out), type(q))
                    sent = comm.bytes_sent
                    gradients = op.backward(q, k, v, out, log_sums, dout, documents)
                    self.assertEqual(comm.bytes_sent - sent, op.backward_bytes)
                    size = np.abs(want[0]).max()
                    self.compare(back(out), want[0], op.query_chunks, bound, size, (name, shape))
                    size = max(np.abs(each).max() for each in want[1:])
                    for got, each, chunks in zip(gradients, want[1:], (op.query_chunks, op.key_chunks, op.key_chunks)):
                        self.compare(back(got), each, chunks, bound, max(size, 1e-3), (name, shape))

            on_ranks(body)

    def test_given_tensors_are_filled(self):
        def body(comm):
            op = tandem.ContextAttention(comm, 9, 2, 4, form="gather")
            rows = sum(count for _, count in op.query_chunks)
            q, k, v, dout = (values((rows, 8), s + comm.rank) for s in range(4))
            out, sums, d = np.empty((rows, 8), "f4"), np.empty((2, rows), "f4"), [np.empty((rows, 8), "f4") for _ in range(3)]
            result = op.forward(q, k, v, out=out, log_sums=sums)
            self.assertTrue(result[0] is out and result[1] is sums)
            got = op.backward(q, k, v, out, sums, dout, dq=d[0], dk=d[1], dv=d[2])
            self.assertTrue(all(a is b for a, b in zip(got, d)))
            for a, b in zip(op.forward(q, k, v), (out, sums)):
                np.testing.assert_array_equal(a, b)

        on_ranks(body)

    def test_errors_name_the_value(self):
        def body(comm):
            def refused(text, call):
                with self.assertRaisesRegex(tandem.InvalidArgument, text):
                    call()

            refused("seq 0: expected", lambda: tandem.ContextAttention(comm, 0, 1, 2))
            refused("dtype f16: expected f32 or bf16", lambda: tandem.ContextAttention(comm, 4, 1, 2, "f16"))
            refused("form 'star': expected one of", lambda: tandem.ContextAttention(comm, 4, 1, 2, form="star"))
            refused("positions -1 rank 0 of 1", lambda: tandem.context_chunks(-1, 1, 0))
            op = tandem.ContextAttention(comm, 4, 1, 2)
            rows = np.zeros((sum(count for _, count in op.query_chunks), 2), "f4")
            refused("context_attention: k ", lambda: op.forward(rows, np.zeros((5, 2), "f4"), rows))
            refused("context_attention: q: dtype", lambda: op.forward(rows.astype("f8"), rows, rows))
            if comm.size > 1:
                with self.assertRaisesRegex(tandem.Mismatch, "seq 5"):
                    tandem.ContextAttention(comm, 4 + (comm.rank == 1), 1, 2)
            op.forward(rows, rows, rows)  # ranks are in step
            return op

        if len(rank_counts()) > 1:
            op = tandem.run(2, body)[0]
            with self.assertRaisesRegex(tandem.InvalidArgument, "context_attention"):
                op.forward_form
            self.assertIn("closed", repr(op))
            del op
            gc.collect()
        else:
            on_ranks(body)


CROSS = dict(text=7, visual=40, hidden=12, features=10, heads=4, kv_heads=2, head_dim=6, batch=2)


def cross_weights(shape):
    q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    return [values(size, s) / 3 for s, size in enumerate(
        ((q, shape["hidden"]), (kv, shape["features"]), (kv, shape["features"]), (shape["hidden"], q)), 11)]


def cross_reference(x, visual, dout, weights, gate, shape):
    """(out, dx, dvisual, dw_q, dw_k, dw_v, dw_out, dgate) of one process."""
    w_q, w_k, w_v, w_out = (w.astype("f8") for w in weights)
    x, visual, dout = x.astype("f8"), visual.astype("f8"), dout.astype("f8")
    scale = np.tanh(gate)
    q, k, v = x @ w_q.T, visual @ w_k.T, visual @ w_v.T
    da = scale * dout @ w_out
    a, dq, dk, dv = reference(q, k, v, da, shape["heads"], shape["kv_heads"], False)

    def of_weight(dy, inputs):
        return np.einsum("bsi,bsj->ij", dy, inputs)

    projected = a @ w_out.T
    return (scale * projected, dq @ w_q, dk @ w_k + dv @ w_v, of_weight(dq, x), of_weight(dk, visual),
            of_weight(dv, visual), of_weight(scale * dout, a), np.array([(dout * projected).sum() * (1 - scale**2)]))


def cross_operands(shape):
    x = values((shape["batch"], shape["text"], shape["hidden"]), 5)
    return x, values((shape["batch"], shape["visual"], shape["features"]), 6), values(x.shape, 7)


def cross_chunks(comm, shape):
    return [tandem.context_chunks(shape[name], comm.size, comm.rank, contiguous=True) for name in ("text", "visual")]


class Cross(unittest.TestCase):
    def check(self, got, want, bound, what):
        self.assertEqual(got.shape, want.shape, what)
        if got.size:
            self.assertLessEqual(np.abs(got - want).max(), bound, what)

    def test_layer(self):
        for name, make, back, dtype in frameworks():
            bound = 1e-6 if "bfloat16" not in name else 5e-2

            def body(comm):
                for text in (1, CROSS["text"]):
                    shape = dict(CROSS, text=text)
                    x, visual, dout = (back(make(each)) for each in cross_operands(shape))
                    weights = [back(make(w)) for w in cross_weights(shape)]
                    want = cross_reference(x, visual, dout, weights, .5, shape)
                    at, keys = cross_chunks(comm, shape)
                    layer = tandem.CrossAttention(comm, dtype=dtype, gate=True, **shape)
                    gate = np.array([.5], "f4") if name == "numpy" else torch.tensor([.5])
                    given = [make(local_rows(x, at)), make(local_rows(visual, keys)), *map(make, weights), gate]
                    out, batch = layer.forward(*given)
                    gradients = layer.backward(batch, make(local_rows(dout, at)), *given)
                    rows = len(positions(at)) * shape["batch"]
                    self.assertLess(batch.bytes, rows * 300 + 256)
                    self.check(back(out), local_rows(want[0], at), bound * np.abs(want[0]).max(), (name, text))
                    size = max(np.abs(each).max() for each in want[1:])
                    got = [back(each) for each in gradients[:2]]
                    got += [tandem.all_reduce(comm, back(each).copy()) for each in gradients[2:]]
                    local = (local_rows(want[1], at), local_rows(want[2], keys), *want[3:])
                    for each, expected in zip(got, local):
                        self.check(each, expected, bound * size, (name, text))
                    frozen = layer.backward(batch, make(local_rows(dout, at)), *given, visual_gradient=False)
                    self.assertIsNone(frozen[1])
                    np.testing.assert_array_equal(back(frozen[0]), back(gradients[0]))

            on_ranks(body)

    def test_errors_name_the_value(self):
        def body(comm):
            shape = dict(CROSS, form="queries")
            layer = tandem.CrossAttention(comm, **shape)
            x, visual, _ = cross_operands(shape)
            at, keys = cross_chunks(comm, shape)
            x, visual, weights = local_rows(x, at), local_rows(visual, keys), cross_weights(shape)
            with self.assertRaisesRegex(tandem.InvalidArgument, "cross_attention: visual "):
                layer.forward(x, visual[1:], *weights)
            with self.assertRaisesRegex(tandem.InvalidArgument, "gate"):
                layer.forward(x, visual, *weights, np.zeros(1, "f4"))
            with self.assertRaisesRegex(tandem.InvalidArgument, "hidden 0: expected"):
                tandem.CrossAttention(comm, **dict(shape, hidden=0))
            if comm.size > 1:
                with self.assertRaisesRegex(tandem.Mismatch, "visual 41"):
                    tandem.CrossAttention(comm, **dict(shape, visual=40 + (comm.rank == 1)))
            layer.forward(x, visual, *weights)

        on_ranks(body)


@unittest.skipUnless(torch, "PyTorch is not installed")
class Torch(unittest.TestCase):
    def test_context_attention_has_gradients(self):
        def body(comm):
            shape = dict(seq=11, heads=4, kv_heads=2, head_dim=4, keys=11, batch=2, rope_theta=50.0)
            whole = operands(shape)
            want = reference(*whole, 4, 2, True, theta=50.0)
            op = tandem.ContextAttention(comm, **shape)
            q, k, v, dout = (torch.tensor(local_rows(x, op.query_chunks)).requires_grad_(i < 3)
                             for i, x in enumerate(whole))
            out = layers.context_attention(op, q, k, v)
            out.backward(dout)
            for got, each in zip((out.detach(), q.grad, k.grad, v.grad), want):
                np.testing.assert_allclose(got, local_rows(each, op.query_chunks), rtol=0, atol=2e-6 * np.abs(each).max())

        on_ranks(body)

    def test_module_is_that_of_one_process(self):
        def body(comm):
            for shape in (CROSS, dict(CROSS, text=1, visual=2)):
                torch.manual_seed(1)
                layer = layers.CrossAttention(comm, gate=True, **shape)
                with torch.no_grad():
                    layer.gate.fill_(.5)
                weights = [w.detach().numpy() for w in (layer.w_q, layer.w_k, layer.w_v, layer.w_out)]
                x, visual, dout = cross_operands(shape)
                want = cross_reference(x, visual, dout, weights, .5, shape)
                at, keys = cross_chunks(comm, shape)
                x, visual = (torch.tensor(each[:, positions(chunks)]).requires_grad_()
                             for each, chunks in ((x, at), (visual, keys)))
                out = layer(x, visual)
                self.assertEqual(out.shape, x.shape)
                out.backward(torch.tensor(dout[:, positions(at)]))
                size = max(np.abs(each).max() for each in want[1:])
                got = (x.grad, visual.grad, *(p.grad for p in (layer.w_q, layer.w_k, layer.w_v, layer.w_out, layer.gate)))
                local = (want[1][:, positions(at)], want[2][:, positions(keys)], *want[3:])
                for each, expected in zip(got, local):
                    np.testing.assert_allclose(each, expected, rtol=0, atol=1e-6 * size)
                np.testing.assert_allclose(out.detach(), want[0][:, positions(at)], rtol=0,
                                           atol=1e-6 * np.abs(want[0]).max())

        on_ranks(body)

    def test_sums_may_be_left_to_the_caller(self):
        def body(comm):
            shape = dict(CROSS)
            layer = tandem.CrossAttention(comm, **shape)
            x, visual, dout = cross_operands(shape)
            at, keys = cross_chunks(comm, shape)
            rows = [torch.tensor(local_rows(each, chunks)) for each, chunks in ((x, at), (visual, keys), (dout, at))]
            both = []
            for sum_gradients in (True, False):
                weights = [torch.tensor(w, requires_grad=True) for w in cross_weights(shape)]
                layers.cross_attention(layer, rows[0], rows[1], *weights, sum_gradients=sum_gradients).backward(rows[2])
                both.append([w.grad for w in weights])
            for summed, local in zip(*both):
                np.testing.assert_allclose(tandem.all_reduce(comm, local.clone()), summed, rtol=0, atol=1e-4)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
