#include "core/operands.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {
namespace {

std::string describe(const Operand& operand) {
  const ByteRange range = byte_range(*operand.tensor);
  return fmt::format("{} {} at [{:#x}, {:#x})", operand.name, operand.tensor->describe(),
                     range.begin, range.end);
}

}  // namespace

ByteRange byte_range(const Tensor& tensor) {
  int64_t last = 0;
  for (int i = 0; i < tensor.dims(); ++i) {
    if (tensor.dim(i) == 0) return {};
    last += (tensor.dim(i) - 1) * tensor.stride(i);
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data());
  return {begin, begin + size_t(last + 1) * size_of(tensor.dtype())};
}

ByteRows byte_rows(const Tensor& tensor) {
  const ByteRange range = byte_range(tensor);
  const ByteRows whole{range.begin, 1, 0, range.end - range.begin};
  if (range.empty()) return {};
  if (tensor.dims() != 2) return whole;
  const int dense = tensor.stride(1) == 1 ? 1 : 0;
  if (tensor.stride(dense) != 1 || tensor.stride(1 - dense) < tensor.dim(dense)) return whole;
  const uint64_t element = size_of(tensor.dtype());
  return {range.begin, uint64_t(tensor.dim(1 - dense)),
          uint64_t(tensor.stride(1 - dense)) * element, uint64_t(tensor.dim(dense)) * element};
}

bool ByteRows::overlaps(const ByteRows& other) const {
  if (rows == 0 || other.rows == 0) return false;
  const auto end = [](const ByteRows& r) { return r.begin + (r.rows - 1) * r.stride + r.width; };
  if (begin >= end(other) || other.begin >= end(*this)) return false;
  for (uint64_t row = 0; row < rows; ++row) {
    const uintptr_t first = begin + row * stride, last = first + width;
    // First row of the other that ends after this one begins.
    uint64_t index = 0;
    if (first >= other.begin + other.width && other.stride > 0) {
      index = (first - other.begin - other.width) / other.stride + 1;
    } else if (first >= other.begin + other.width) {
      continue;
    }
    if (index < other.rows && other.begin + index * other.stride < last) return true;
  }
  return false;
}

void require_writable(std::string_view op, const Operand& output) {
  if (!output.tensor->read_only()) return;
  throw InvalidArgument(fmt::format("{}: {} {} is read-only: expected memory to write to", op,
                                    output.name, output.tensor->describe()));
}

void refuse_overlap(std::string_view op, const Operand& output, const Operand& other,
                    std::string_view expected) {
  throw InvalidArgument(fmt::format("{}: {} overlaps {}: expected {}", op, describe(output),
                                    describe(other), expected));
}

void require_apart(std::string_view op, std::initializer_list<Operand> outputs,
                   std::initializer_list<Operand> inputs) {
  const auto check = [&](const Operand& output, const ByteRange& range, const Operand& other) {
    if (other.tensor && range.overlaps(byte_range(*other.tensor))) {
      refuse_overlap(op, output, other);
    }
  };
  for (const Operand* output = outputs.begin(); output != outputs.end(); ++output) {
    if (!output->tensor) continue;
    require_writable(op, *output);
    const ByteRange range = byte_range(*output->tensor);
    for (const Operand* other = output + 1; other != outputs.end(); ++other) {
      check(*output, range, *other);
    }
    for (const Operand& input : inputs) check(*output, range, input);
  }
}

std::string describe_with_strides(const Tensor& tensor) {
  std::string text = tensor.describe();
  for (int i = 0; i < tensor.dims(); ++i) {
    text += fmt::format("{}{}", i == 0 ? " with strides " : ", ", tensor.stride(i));
  }
  return text;
}

}  // namespace tandem
