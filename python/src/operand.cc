#include "operand.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <string>

#include "dlpack.h"
#include "errors.h"
#include "tandem/error.h"
#include "torch_tensor.h"

namespace tandem::python {
namespace {

bool has_module(nb::handle object, std::string_view prefix) {
  const std::string module = nb::cast<std::string>(nb::str(object.type().attr("__module__")));
  return std::string_view(module).substr(0, prefix.size()) == prefix;
}

bool parse_code(const DLDataType& type, DType& dtype) {
  if (type.lanes != 1) return false;
  const struct {
    uint8_t code, bits;
    DType dtype;
  } known[] = {{kDlFloat, 32, DType::f32},
               {kDlBFloat, 16, DType::bf16},
               {kDlFloat, 16, DType::f16},
               {kDlInt, 32, DType::i32},
               {kDlUInt, 8, DType::u8}};
  for (const auto& each : known) {
    if (each.code != type.code || each.bits != type.bits) continue;
    dtype = each.dtype;
    return true;
  }
  return false;
}

bool parse_format(std::string_view format, int64_t item, DType& dtype) {
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) {
    format.remove_prefix(1);
  }
  if (format == "f") {
    dtype = DType::f32;
  } else if (format == "e") {
    dtype = DType::f16;
  } else if ((format == "i" || format == "l") && item == 4) {
    dtype = DType::i32;
  } else if (format == "B") {
    dtype = DType::u8;
  } else {
    return false;
  }
  return true;
}

const char* const kDTypes = "expected f32, bf16, f16, i32 or u8";

}  // namespace

Operand::Operand(nb::handle object, std::string_view op, const char* name) : op_(op), name_(name) {
  try {
    if (take_torch(object) || take_buffer(object) || take_protocol(object)) {
      if (tensor_.elements() > 0 && !tensor_.data()) refuse("no memory behind it");
      require_aligned();
      return;
    }
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt and similar
    refuse(nb::cast<std::string>(nb::str(error.value())));
  }
  refuse(
      fmt::format("{}: expected a tensor: PyTorch's, NumPy's, or one with __dlpack__ or a buffer",
                  type_of(object)));
}

BorrowedMemory::~BorrowedMemory() {
  if (has_buffer) PyBuffer_Release(&buffer);
  if (managed) free(managed);
}

void Operand::refuse(std::string_view what) const {
  throw InvalidArgument(fmt::format("{}: {}: {}", op_, name_, what));
}

void Operand::require_aligned() const {
  const auto address = reinterpret_cast<uintptr_t>(tensor_.data());
  const size_t bytes = size_of(tensor_.dtype());
  if (tensor_.elements() == 0 || address % bytes == 0) return;
  refuse(fmt::format("elements of {} bytes at address {:#x}: expected a multiple of {}", bytes,
                     address, bytes));
}

bool Operand::take_torch(nb::handle object) {
  if (!is_torch(object)) return false;
  if (loses_gradient(object)) {
    refuse(
        "requires a gradient, which would be lost: expected it detached, torch.no_grad(), or "
        "tandem.torch");
  }
  if (is_negated(object)) {
    refuse("negated where it is read, not where it lies: expected it after resolve_neg()");
  }
  if (view_torch(object, tensor_)) return true;
  if (is_traced()) {
    refuse("within torch.jit.trace, whose graph would leave the call out: expected it outside");
  }
  take_capsule(torch_capsule(object), false);
  return true;
}

bool Operand::take_buffer(nb::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  if (has_module(object, "cupy")) return false;  // its buffer is for managed memory
  bool is_bf16 = false;
  if (PyObject_GetBuffer(object.ptr(), &borrowed_.buffer, PyBUF_FULL_RO) != 0) {
    nb::python_error failure;
    // GPU arrays have no buffer, nor do bfloat16 arrays, which use DLPack since a view would copy.
    if (has_module(object, "jax")) return false;
    const nb::object dtype = nb::getattr(object, "dtype", nb::none());
    if (nb::cast<std::string>(nb::str(dtype)) != "bfloat16") {
      refuse(fmt::format("{}: {}", nb::cast<std::string>(nb::str(failure.value())), kDTypes));
    }
    // ml_dtypes arrays have no buffer, but can be viewed as integers.
    if (!has_module(object, "numpy")) return false;
    const nb::object bits = object.attr("view")("uint16");
    if (PyObject_GetBuffer(bits.ptr(), &borrowed_.buffer, PyBUF_FULL_RO) != 0) {
      throw nb::python_error();
    }
    is_bf16 = true;
  }
  borrowed_.has_buffer = true;
  view_buffer(is_bf16);
  return true;
}

void Operand::view_buffer(bool is_bf16) {
  const Py_buffer& buffer = borrowed_.buffer;
  DType dtype = DType::bf16;
  const std::string_view format = buffer.format ? buffer.format : "B";
  if (!is_bf16 && !parse_format(format, buffer.itemsize, dtype)) {
    refuse(fmt::format("dtype '{}': {}", format, kDTypes));
  }
  if (buffer.suboffsets) refuse("a buffer of pointers: expected strides");
  if (buffer.ndim > kMaxDims) {
    refuse(fmt::format("{} dimensions: expected at most {}", buffer.ndim, kMaxDims));
  }
  std::array<int64_t, kMaxDims> shape{}, strides{};
  const auto dims = size_t(buffer.ndim);
  for (size_t i = 0; i < dims; ++i) {
    shape[i] = buffer.shape[i];
    if (buffer.strides[i] % buffer.itemsize != 0) refuse("strides that are no whole elements");
    strides[i] = buffer.strides[i] / buffer.itemsize;
  }
  try {
    tensor_ = Tensor(buffer.buf, dtype, std::span<const int64_t>(shape.data(), dims),
                     std::span<const int64_t>(strides.data(), dims));
  } catch (const InvalidArgument& error) {
    refuse(error.what());
  }
  if (buffer.readonly) tensor_ = tensor_.as_read_only();
}

bool Operand::take_protocol(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack__")) return false;
  const bool immutable = has_module(object, "jax");
  if (immutable) object.attr("block_until_ready")();
  nb::object capsule;
  try {
    // -1: the call itself orders its stream with the rank's (gpu.h).
    capsule = has_module(object, "cupy")
                  ? object.attr("__dlpack__")(nb::arg("stream") = -1)
                  : object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")();
  }
  take_capsule(std::move(capsule), immutable);
  return true;
}

void Operand::take_capsule(nb::object capsule, bool read_only) {
  if (void* found = PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")
                        ? PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned")
                        : nullptr) {
    const auto* const managed = static_cast<DLManagedTensorVersioned*>(found);
    if (managed->major != 1) refuse(fmt::format("DLPack {}: expected 1", managed->major));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    borrowed_.managed = found;
    borrowed_.free = [](void* gone) {
      auto* const each = static_cast<DLManagedTensorVersioned*>(gone);
      if (each->free) each->free(each);
    };
    // The tensor would not see writes to a copy.
    view(&managed->tensor, read_only || (managed->flags & (kDlReadOnly | kDlCopied)));
    return;
  }
  void* found = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  if (!found) throw nb::python_error();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  borrowed_.managed = found;
  borrowed_.free = [](void* gone) {
    auto* const each = static_cast<DLManagedTensor*>(gone);
    if (each->free) each->free(each);
  };
  view(&static_cast<DLManagedTensor*>(found)->tensor, read_only);
}

void Operand::view(const void* managed, bool read_only) {
  const auto& t = *static_cast<const DLTensor*>(managed);
  DType dtype = DType::f32;
  if (!parse_code(t.dtype, dtype)) {
    refuse(
        fmt::format("dtype of DLPack code {}, {} bits: {}", t.dtype.code, t.dtype.bits, kDTypes));
  }
  if (t.dims < 0 || t.dims > kMaxDims) {
    refuse(fmt::format("{} dimensions: expected at most {}", t.dims, kMaxDims));
  }
  if (t.dims > 0 && !t.shape) refuse("a DLPack tensor without a shape: expected one");
  Device device;
  if (t.device.type == kDlCuda) {
    device = {DeviceKind::cuda, t.device.index};
  } else if (t.device.type != kDlCpu && t.device.type != kDlCudaHost) {
    refuse(fmt::format("on device {} of DLPack: expected memory of the host", t.device.type));
  }
  const auto dims = size_t(t.dims);
  auto* const data = t.data ? static_cast<std::byte*>(t.data) + t.byte_offset : nullptr;
  const std::span<const int64_t> shape(t.shape, dims);
  try {
    tensor_ = t.strides ? Tensor(static_cast<void*>(data), dtype, shape,
                                 std::span<const int64_t>(t.strides, dims), device)
                        : Tensor(static_cast<void*>(data), dtype, shape, device);
  } catch (const InvalidArgument& error) {
    refuse(error.what());
  }
  if (read_only) tensor_ = tensor_.as_read_only();
}

bool is_jax(nb::handle object) {
  return has_module(object, "jax") || has_module(object, "tandem._frameworks");
}

namespace {

nb::object frameworks(const char* name) {
  static nb::object module;
  if (!module.is_valid()) {
    module = nb::module_::import_("tandem._frameworks");
    module.inc_ref();  // lives as long as the process
  }
  return module.attr(name);
}

}  // namespace

nb::object new_result(nb::handle x, std::span<const int64_t> shape, std::string_view op,
                      const char* dtype, Fill fill) {
  nb::list sizes;
  for (const int64_t size : shape) sizes.append(size);
  nb::object result = frameworks("empty")(x, nb::tuple(sizes), dtype, fill == Fill::zeros);
  if (!result.is_none()) return result;
  throw InvalidArgument(fmt::format(
      "{}: out: none given, and x is a {}: expected out, or x of NumPy, PyTorch, CuPy or JAX", op,
      type_of(x)));
}

nb::object writable(nb::handle x) {
  return is_torch(x) ? nb::borrow(x) : frameworks("writable")(x);
}

nb::object written(nb::handle x, nb::object out, bool fresh) {
  if (fresh && !is_torch(x) && Py_TYPE(x.ptr()) != Py_TYPE(out.ptr())) {
    return frameworks("finish")(x, out);
  }
  if (!fresh && is_torch(out)) count_write(out);
  return out;
}

DType dtype_from(nb::handle object) {
  if (DType known; nb::try_cast(object, known)) return known;
  std::string name;
  if (nb::isinstance<nb::str>(object)) {
    name = nb::cast<std::string>(object);
  } else if (nb::hasattr(object, "__name__")) {
    name = nb::cast<std::string>(nb::str(object.attr("__name__")));  // numpy.float32
  } else {
    name = nb::cast<std::string>(nb::str(object));  // torch.float32, numpy.dtype("float32")
  }
  if (name.rfind("torch.", 0) == 0) name.erase(0, 6);
  const std::pair<const char*, const char*> others[] = {
      {"float32", "f32"}, {"bfloat16", "bf16"}, {"float16", "f16"},
      {"int32", "i32"},   {"uint8", "u8"},      {"float8_e4m3fn", "e4m3"}};
  for (const auto& [remote, ours] : others) {
    if (name == remote) name = ours;
  }
  return parse_dtype(name);
}

}  // namespace tandem::python
