"""tandem.Wire: parsing of its text, messages of arrays, and calls that accept codec=."""
import unittest

import numpy as np

import tandem
from ranks import jax, on_ranks, torch, values


class Wires(unittest.TestCase):
    def test_text(self):
        wire = tandem.Wire("int4:g32")
        self.assertEqual((str(wire), repr(wire), wire.group), ("int4:g32", "tandem.Wire('int4:g32')", 32))
        self.assertEqual({wire, tandem.Wire("int4:g32")}, {wire})
        self.assertNotEqual(wire, tandem.Wire("int4"))
        self.assertNotEqual(wire, "int4:g32")
        self.assertEqual((wire.is_exact, tandem.Wire("lossless").is_exact), (False, True))
        self.assertEqual(wire.bytes(4096), 4096 // 2 + 4096 // 32 * 2)
        self.assertEqual(wire.bits_per_element("bf16"), 4.5)
        for bad in ("int9", "", "int8:g48"):
            with self.assertRaises(tandem.InvalidArgument):
                tandem.Wire(bad)
        for elements in (-1, 2**60):
            with self.assertRaisesRegex(tandem.InvalidArgument, "elements"):
                wire.bytes(elements)

    def test_there_and_back(self):
        x = values((3, 5, 64), 1)
        for text in ("int8", "int4:g32", "int2:asym:spikes", "mxfp4", "e4m3", "lossless"):
            wire = tandem.Wire(text)
            message = wire.encode(x)
            self.assertEqual((message.dtype, message.ndim), (np.uint8, 1))
            self.assertLessEqual(message.size, wire.bytes(x.size))
            back = wire.decode(message, np.empty_like(x))
            groups = np.abs(x).reshape(-1, 32 if text.endswith("32") or "mx" in text else x.size).max(1)
            self.assertLessEqual(np.abs(back - x).max(), wire.error_bound * groups.max() * 1.001)
            if wire.is_exact:
                np.testing.assert_array_equal(back, x)
            room = np.zeros(wire.bytes(x.size) + 7, "u1")
            given = wire.encode(x, room)
            self.assertTrue(np.shares_memory(given, room))
            np.testing.assert_array_equal(given, message)

    def test_frameworks(self):
        wire = tandem.Wire("int8")
        x = values((4, 32), 1)
        message = wire.encode(x)
        if torch:
            t = torch.tensor(x)
            encoded = wire.encode(t)
            self.assertEqual((encoded.dtype, encoded.tolist()), (torch.uint8, message.tolist()))
            back = torch.empty(4, 32, dtype=torch.float32)
            self.assertIs(wire.decode(encoded, back), back)
            np.testing.assert_array_equal(back.numpy(), wire.decode(message, np.empty_like(x)))
        if jax:
            encoded = wire.encode(jax.numpy.asarray(x))
            self.assertIsInstance(encoded, jax.Array)
            self.assertEqual(encoded.tolist(), message.tolist())

    def test_refused(self):
        wire, x = tandem.Wire("int8"), values((4, 32), 1)
        message = wire.encode(x)
        frozen = np.zeros_like(x)
        frozen.flags.writeable = False
        for pattern, call in (
                ("into 3 bytes: expected at least 144", lambda: wire.encode(x, np.zeros(3, "u1"))),
                ("encode: out: f32.*expected contiguous u8", lambda: wire.encode(x, np.zeros(999, "f4"))),
                ("encode: x", lambda: wire.encode(x.astype("f8"))),
                ("", lambda: wire.encode(x.T)),
                ("", lambda: wire.encode(x.astype("i4"))),
                ("", lambda: wire.decode(message[:-1].copy(), x)),
                ("decode: message: u8.*expected contiguous", lambda: wire.decode(message[::2], x)),
                ("out: read-only", lambda: wire.decode(message, frozen))):
            with self.assertRaisesRegex(tandem.InvalidArgument, pattern):
                call()

    def test_as_codec(self):
        def body(comm):
            for codec in ("int8", tandem.Wire("int8")):
                yield tandem.all_reduce(comm, values((8, 128), 1), codec=codec)
                yield tandem.GemmAr(comm, 4, 8, 128, codec=codec)(values((4, 128), 1), values((8, 128), 2))

        def same(comm):
            got = list(body(comm))
            np.testing.assert_array_equal(got[0], got[2])
            np.testing.assert_array_equal(got[1], got[3])
            for bad in (8, 1.5, b"int8", object()):
                with self.assertRaisesRegex(tandem.InvalidArgument, "codec"):
                    tandem.all_reduce(comm, values((8, 128), 1), codec=bad)

        on_ranks(same)


if __name__ == "__main__":
    unittest.main()
