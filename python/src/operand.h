// Python memory borrowed for a call: a view of any tensor that supports DLPack or the buffer
// protocol. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string_view>

#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

/// Owner of the borrowed memory, which it releases, also if the Operand's constructor throws.
struct BorrowedMemory {
  BorrowedMemory() = default;
  BorrowedMemory(const BorrowedMemory&) = delete;
  BorrowedMemory& operator=(const BorrowedMemory&) = delete;
  ~BorrowedMemory();

  Py_buffer buffer{};
  bool has_buffer = false;
  void (*free)(void*) = nullptr;
  void* managed = nullptr;
};

class Operand {
 public:
  /// Throws InvalidArgument naming `op` and `name` if it is not a tensor, has a dtype or layout
  /// that Tensor does not support, or is a PyTorch tensor that would lose its gradient. Holds the
  /// memory.
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
  BorrowedMemory borrowed_;
};

/// True for a JAX array, also one made by new_result or writable. JAX has no current stream.
bool is_jax(nb::handle object);

/// Elements of a new tensor whose dtype is given.
enum class Fill : bool { none, zeros };
/// New tensor of x's framework, with x's dtype unless `dtype` is given. Throws InvalidArgument
/// naming `op` if x has no framework: then `out` must be given.
nb::object new_result(nb::handle x, std::span<const int64_t> shape, std::string_view op,
                      const char* dtype = nullptr, Fill fill = Fill::zeros);
/// x, or a writable copy if its framework's arrays are immutable.
nb::object writable(nb::handle x);
/// Array returned to the caller for `out`: one made by new_result or writable (`fresh`), or the
/// caller's own, whose modification autograd is told of.
nb::object written(nb::handle x, nb::object out, bool fresh = false);

/// A DType, or its name in any framework: "f32", "float32", torch.float32, numpy.float32.
DType dtype_from(nb::handle object);

}  // namespace tandem::python
