// Memory that Python lends for a call: any tensor that speaks DLPack or the buffer protocol, as a
// view of where it lies. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string_view>

#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

/// What was lent, given back with this: also when the Operand that took it is refused.
struct Lent {
  Lent() = default;
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent();

  Py_buffer buffer{};
  bool has_buffer = false;
  void (*free)(void*) = nullptr;
  void* managed = nullptr;
};

class Operand {
 public:
  /// Throws InvalidArgument naming `op` and `name` for what is no tensor or has a dtype or layout
  /// that Tensor has not, and for one of PyTorch's that would lose its gradient. Holds the memory.
  Operand(nb::handle object, std::string_view op, const char* name);
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  const Tensor& tensor() const { return tensor_; }

 private:
  bool take_torch(nb::handle object);
  bool take_buffer(nb::handle object);
  bool take_protocol(nb::handle object);
  void take_capsule(nb::object capsule, bool read_only);
  void view(const void* managed, bool read_only);
  void view_buffer(bool is_bf16);
  void require_aligned() const;
  [[noreturn]] void refuse(std::string_view what) const;

  const std::string_view op_;
  const char* const name_;
  Tensor tensor_;
  Lent lent_;
};

/// An array of JAX's, also one that new_result or writable has made. JAX has no current stream.
bool is_jax(nb::handle object);

/// A new tensor of x's framework and, unless `dtype` says otherwise, dtype. Throws InvalidArgument
/// naming `op` where x has no framework: then `out` must be given.
nb::object new_result(nb::handle x, std::span<const int64_t> shape, std::string_view op,
                      const char* dtype = nullptr);
/// x, or where its framework has no writing a copy that has.
nb::object writable(nb::handle x);
/// The array that the caller gets for `out`: made by new_result or writable (`fresh`), or the
/// caller's own, and then autograd is told that it was written.
nb::object written(nb::handle x, nb::object out, bool fresh = false);

/// A DType, or its name in any framework: "f32", "float32", torch.float32, numpy.float32.
DType dtype_from(nb::handle object);

}  // namespace tandem::python
