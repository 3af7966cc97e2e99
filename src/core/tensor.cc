#include "tandem/tensor.h"

#include <fmt/format.h>

#include <algorithm>

#include "tandem/error.h"

namespace tandem {

DType parse_dtype(std::string_view name) {
  for (const DType type :
       {DType::f32, DType::bf16, DType::f16, DType::i32, DType::u8, DType::e4m3}) {
    if (name == name_of(type)) return type;
  }
  throw InvalidArgument(fmt::format("dtype '{}': expected f32, bf16, f16, i32, u8 or e4m3", name));
}

Tensor::Tensor(void* data, DType dtype, Extents shape, Device device)
    : Tensor(data, dtype, std::span(shape.begin(), shape.size()), device) {}

Tensor::Tensor(void* data, DType dtype, std::span<const int64_t> shape, Device device)
    : data_(data), dims_(int(shape.size())), dtype_(dtype), device_(device) {
  if (shape.size() > kMaxDims) {
    throw InvalidArgument(
        fmt::format("tensor has {} dimensions: expected at most {}", shape.size(), kMaxDims));
  }
  for (int i = 0; i < dims_; ++i) {
    const int64_t extent = shape[size_t(i)];
    if (extent < 0) {
      throw InvalidArgument(
          fmt::format("tensor dimension {} is {}: expected at least 0", i, extent));
    }
    shape_[size_t(i)] = extent;
  }
  require_countable();
  int64_t stride = 1;
  for (int i = dims_ - 1; i >= 0; --i) {
    strides_[size_t(i)] = stride;
    stride *= shape_[size_t(i)];
  }
}

Tensor::Tensor(void* data, DType dtype, Extents shape, Extents strides, Device device)
    : Tensor(data, dtype, std::span(shape.begin(), shape.size()),
             std::span(strides.begin(), strides.size()), device) {}

Tensor::Tensor(void* data, DType dtype, std::span<const int64_t> shape,
               std::span<const int64_t> strides, Device device)
    : Tensor(data, dtype, shape, device) {
  if (strides.size() != shape.size()) {
    throw InvalidArgument(
        fmt::format("{} has {} strides: expected {}", describe(), strides.size(), shape.size()));
  }
  std::copy(strides.begin(), strides.end(), strides_.begin());
  require_countable();
}

// Byte offsets of elements are computed in int64_t everywhere.
void Tensor::require_countable() const {
  int64_t count = int64_t(size_of(dtype_)), last = 0;
  bool fits = true;
  for (int i = 0; i < dims_; ++i) {
    const int64_t extent = shape_[size_t(i)], stride = strides_[size_t(i)];
    if (stride < 0) {
      throw InvalidArgument(
          fmt::format("{}: stride {} of dimension {}: expected at least 0", describe(), stride, i));
    }
    // An extent of 0 does not excuse an overflow in the others: views may have other extents.
    int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(count, std::max<int64_t>(extent, 1), &count) &&
           !__builtin_mul_overflow(stride, std::max<int64_t>(extent, 1), &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  if (fits && !__builtin_mul_overflow(last, int64_t(size_of(dtype_)), &last)) return;
  throw InvalidArgument(fmt::format("{}: expected less than 2^63 bytes", describe()));
}

void Tensor::require_elements(size_t count) const {
  if (size_t(elements()) == count) return;
  throw InvalidArgument(
      fmt::format("{} over {} values: expected {}", describe(), count, elements()));
}

void Tensor::require_type(DType dtype, bool is_const) const {
  if (dtype_ != dtype) {
    throw InvalidArgument(
        fmt::format("data of {} as {}: expected {}", describe(), name_of(dtype), name_of(dtype_)));
  }
  if (read_only_ && !is_const) {
    throw InvalidArgument(
        fmt::format("data of {}, read-only: expected a const element type", describe()));
  }
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < dims_; ++i) count *= shape_[size_t(i)];
  return count;
}

bool Tensor::contiguous() const {
  int64_t stride = 1;
  for (int i = dims_ - 1; i >= 0; --i) {
    if (dim(i) != 1 && strides_[size_t(i)] != stride && elements() != 0) return false;
    stride *= dim(i);
  }
  return true;
}

Tensor Tensor::narrow(int dim, int64_t begin, int64_t count) const {
  const int i = dim < 0 ? dim + dims_ : dim;
  if (i < 0 || i >= dims_) {
    throw InvalidArgument(
        fmt::format("dimension {} of {}: expected one of its {}", dim, describe(), dims_));
  }
  if (begin < 0 || count < 0 || begin > this->dim(i) || count > this->dim(i) - begin) {
    throw InvalidArgument(
        fmt::format("{} from {} of dimension {} of {}: out of range", count, begin, i, describe()));
  }
  Tensor view = *this;
  view.data_ = static_cast<std::byte*>(data_) + size_t(begin * stride(i)) * size_of(dtype_);
  view.shape_[size_t(i)] = count;
  return view;
}

Tensor Tensor::rows(int64_t begin, int64_t count) const {
  return narrow(0, begin, count);
}

Tensor Tensor::transposed() const {
  if (dims_ < 2) throw InvalidArgument("transposed: expected two dimensions, got " + describe());
  Tensor view = *this;
  std::swap(view.shape_[0], view.shape_[1]);
  std::swap(view.strides_[0], view.strides_[1]);
  return view;
}

Tensor Tensor::as_read_only() const {
  Tensor view = *this;
  view.read_only_ = true;
  return view;
}

std::string Tensor::describe() const {
  return fmt::format("{}[{}]", name_of(dtype_),
                     fmt::join(shape_.begin(), shape_.begin() + dims_, ", "));
}

}  // namespace tandem
