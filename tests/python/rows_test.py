"""Classes of the operators: one for each row of the registry."""
import os
import unittest

import numpy as np

import tandem
from tandem import _core

CLASSES = _core._Operator.__subclasses__()


class Rows(unittest.TestCase):
    def test_each_row_has_a_class(self):
        self.assertLessEqual({"AgGemm", "GemmRs", "GemmAr", "AgWgrad"},
                             {each.__name__ for each in CLASSES})
        for each in CLASSES:
            self.assertIs(getattr(_core, each.__name__), each)
            self.assertIs(getattr(tandem, each.__name__), each)
        wanted = os.environ.get("TANDEM_TEST_CLASS")
        if wanted:
            self.assertIn(wanted, {each.__name__ for each in CLASSES})

    def test_serial_and_overlapped_calls_agree(self):
        def body(comm, kind):
            results = []
            for strategy in ("serial", "overlapped"):
                op = kind(comm, 37, 8, 16, strategy=strategy)
                (_, *x_shape), (_, *weight_shape), (_, *out_shape) = op._operands
                x = np.arange(np.prod(x_shape), dtype="f4").reshape(x_shape) % 7 + comm.rank + 1
                weight = np.arange(np.prod(weight_shape), dtype="f4").reshape(weight_shape) % 5 + 1
                out = op(x, weight)
                self.assertEqual(list(out.shape), out_shape)
                self.assertGreater(np.abs(out).max(), 0)
                with self.assertRaises(tandem.InvalidArgument):
                    op(x, weight, np.empty((1, 3), "f4"))
                results.append(out)
            np.testing.assert_array_equal(*results)

        for kind in CLASSES:
            for ranks in (1, 3):
                with self.subTest(kind=kind.__name__, ranks=ranks):
                    tandem.run(ranks, lambda comm: body(comm, kind))


if __name__ == "__main__":
    unittest.main()
