// Checks of the operands of every operator and collective: outputs are writable and overlap no
// other operand.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tandem/tensor.h"

namespace tandem {

/// Bytes from a tensor's first element to its last, including gaps between rows; empty without
/// elements.
struct ByteRange {
  uintptr_t begin = 0, end = 0;
  bool empty() const { return begin == end; }
  bool overlaps(const ByteRange& other) const {
    return begin < other.end && other.begin < end && !empty() && !other.empty();
  }
  bool operator==(const ByteRange&) const = default;
};
ByteRange byte_range(const Tensor& tensor);

/// Bytes of a tensor's elements: `rows` times `width`, `stride` apart.
struct ByteRows {
  uintptr_t begin = 0;
  uint64_t rows = 0, stride = 0, width = 0;
  bool overlaps(const ByteRows& other) const;
};
/// Exact for a matrix with dense rows or columns; for another tensor, all bytes from its first
/// element to its last.
ByteRows byte_rows(const Tensor& tensor);

/// Tensor and its name in messages; `tensor` is null for an absent operand.
struct Operand {
  std::string_view name;
  const Tensor* tensor;
};

/// Throws InvalidArgument if an output overlaps another output or an input (with `op`, both
/// operands and their addresses), or is read-only (with its name).
void require_apart(std::string_view op, std::initializer_list<Operand> outputs,
                   std::initializer_list<Operand> inputs);
/// Throws InvalidArgument for an overlap.
[[noreturn]] void refuse_overlap(std::string_view op, const Operand& output, const Operand& other,
                                 std::string_view expected = "memory of its own");
void require_writable(std::string_view op, const Operand& output);

/// "f32[8, 4] with strides 1, 8".
std::string describe_with_strides(const Tensor& tensor);

}  // namespace tandem
