"""Tensors are used in place: a call reads the framework's own address."""
import unittest

import numpy as np

import tandem
from ranks import jax, ml_dtypes, torch
from tandem import _core

if jax:
    import jax.numpy as jnp


class Addresses(unittest.TestCase):
    def test_numpy(self):
        for dtype in ("f4", "f2", "i4", "u1"):
            x = np.ones((4, 6), dtype)
            for view in (x, x.T, x[1:, 2:], x[::2]):
                self.assertEqual(_core._address(view), view.ctypes.data)

    @unittest.skipUnless(ml_dtypes, "ml_dtypes is not installed: NumPy has no bfloat16")
    def test_a_bfloat16_of_numpy(self):
        x = np.ones((4, 6), ml_dtypes.bfloat16)
        self.assertEqual(_core._address(x[1:, 2:]), x[1:, 2:].ctypes.data)

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_torch(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8):
            x = torch.ones(4, 6).to(dtype)
            for view in (x, x.t(), x[1:, 2:], x[::2], x[0], x[0, 0], x[:0], x.expand(2, 4, 6)):
                self.assertEqual(_core._address(view), view.data_ptr())
        parameter = torch.nn.Parameter(torch.ones(4, 6), requires_grad=False)
        self.assertEqual(_core._address(parameter), parameter.data_ptr())

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_subclasses_of_torch_tensors(self):
        class Own(torch.Tensor):
            pass

        x = torch.ones(4, 6).as_subclass(Own)
        self.assertEqual(_core._address(x), x.data_ptr())

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_what_torch_reads_otherwise_than_it_lies_is_refused(self):
        negated = torch.ones(4, 6, dtype=torch.complex64).conj().imag
        self.assertTrue(negated.is_neg())
        with self.assertRaisesRegex(tandem.InvalidArgument, "negated"):
            _core._address(negated)
        self.assertEqual(_core._address(negated.resolve_neg()) > 0, True)
        for other in (torch.ones(4, 6).to_sparse(), torch.ones(4, 6, device="meta"),
                      torch.ones(4, 6).to_mkldnn(), torch.ones(4, 6, dtype=torch.complex64)):
            with self.assertRaises(tandem.InvalidArgument):
                _core._address(other)

    @unittest.skipUnless(jax, "JAX is not installed: tools/setup_python.sh fetches it")
    def test_jax(self):
        for dtype in ("float32", "bfloat16", "float16", "int32", "uint8"):
            x = jnp.ones((4, 6), dtype)
            self.assertEqual(_core._address(x), x.unsafe_buffer_pointer(), dtype)


if __name__ == "__main__":
    unittest.main()
