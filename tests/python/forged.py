"""Hand-made DLPack tensors with arbitrary fields."""
import ctypes


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32),
        ("dims", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("manager", ctypes.c_void_p), ("free", Free)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("free", Free), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

READ_ONLY, COPIED = 1, 2


class Forged:
    """f32 [4, 5] of ones, with any field overridden. freed: number of calls of its deleter."""

    def __init__(self, *, versioned=True, shape=(4, 5), strides=(5, 1), major=1, flags=0, name=None,
                 **fields):
        self.memory = (ctypes.c_float * 64)(*[1.0] * 64)
        self.freed = 0
        self.shape = shape and (ctypes.c_int64 * 8)(*shape)
        self.strides = strides and (ctypes.c_int64 * 8)(*strides)
        tensor = Tensor(ctypes.addressof(self.memory), 1, 0, 2, 2, 32, 1, self.shape, self.strides, 0)
        for field, value in fields.items():
            setattr(tensor, field, value)
        self.free = Free(self._free)
        self.managed = Versioned(major, 0, None, self.free, flags, tensor) if versioned else \
            Unversioned(tensor, None, self.free)
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")

    def _free(self, _):
        self.freed += 1

    def __dlpack__(self, **options):
        return new_capsule(ctypes.addressof(self.managed), self.name, None)

    def __dlpack_device__(self):
        return (1, 0)
