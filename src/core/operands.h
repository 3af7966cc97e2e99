// What every operator and collective asks of the memory of its operands: what it writes is not
// read-only, and overlaps nothing else.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tandem/tensor.h"

namespace tandem {

/// The bytes from a tensor's first element to its last: empty without elements. What lies between
/// rows that are not dense counts too.
struct ByteRange {
  uintptr_t begin = 0, end = 0;
  bool empty() const { return begin == end; }
  bool overlaps(const ByteRange& other) const {
    return begin < other.end && other.begin < end && !empty() && !other.empty();
  }
  bool operator==(const ByteRange&) const = default;
};
ByteRange byte_range(const Tensor& tensor);

/// The bytes of a tensor's elements: `rows` times `width`, `stride` apart.
struct ByteRows {
  uintptr_t begin = 0;
  uint64_t rows = 0, stride = 0, width = 0;
  bool overlaps(const ByteRows& other) const;
};
/// Of a matrix with dense rows or columns, exactly; of another tensor all from its first element to
/// its last.
ByteRows byte_rows(const Tensor& tensor);

/// A tensor as a call's messages name it; none where `tensor` is null.
struct Operand {
  std::string_view name;
  const Tensor* tensor;
};

/// Throws InvalidArgument naming `op`, both operands and their addresses when an output overlaps
/// another output or an input, and naming the output when it is read-only.
void require_apart(std::string_view op, std::initializer_list<Operand> outputs,
                   std::initializer_list<Operand> inputs);
/// Throws InvalidArgument that says so.
[[noreturn]] void refuse_overlap(std::string_view op, const Operand& output, const Operand& other,
                                 std::string_view expected = "memory of its own");
void require_writable(std::string_view op, const Operand& output);

/// "f32[8, 4] with strides 1, 8".
std::string describe_with_strides(const Tensor& tensor);

}  // namespace tandem
