#include "tandem/tensor.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "tandem/error.h"

namespace tandem {

DType parse_dtype(std::string_view name) {
  for (const DType type :
       {DType::f32, DType::bf16, DType::f16, DType::i32, DType::u8, DType::e4m3}) {
    if (name == name_of(type)) return type;
  }
  throw InvalidArgument(fmt::format("dtype '{}': expected f32, bf16, f16, i32, u8 or e4m3", name));
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device)
    : Tensor(data, dtype, std::span(shape.begin(), shape.size()), device) {}

Tensor::Tensor(void* data, DType dtype, std::span<const int64_t> shape, Device device)
    : data_(data), dims_(int(shape.size())), dtype_(dtype), device_(device) {
  if (shape.size() > kMaxDims) {
    throw InvalidArgument(
        fmt::format("tensor has {} dimensions: expected at most {}", shape.size(), kMaxDims));
  }
  int64_t stride = 1;
  for (int i = dims_ - 1; i >= 0; --i) {
    const int64_t extent = shape[size_t(i)];
    if (extent < 0) {
      throw InvalidArgument(
          fmt::format("tensor dimension {} is {}: expected at least 0", i, extent));
    }
    shape_[size_t(i)] = extent;
    strides_[size_t(i)] = stride;
    stride *= extent;
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

Tensor Tensor::rows(int64_t begin, int64_t count) const {
  if (dims_ < 1 || begin < 0 || count < 0 || begin + count > dim(0)) {
    throw InvalidArgument(
        fmt::format("rows [{}, {}) of {}: out of range", begin, begin + count, describe()));
  }
  Tensor view = *this;
  view.data_ = static_cast<std::byte*>(data_) + size_t(begin * stride(0)) * size_of(dtype_);
  view.shape_[0] = count;
  return view;
}

Tensor Tensor::transposed() const {
  if (dims_ < 2) throw InvalidArgument("transposed: expected two dimensions, got " + describe());
  Tensor view = *this;
  std::swap(view.shape_[0], view.shape_[1]);
  std::swap(view.strides_[0], view.strides_[1]);
  return view;
}

std::string Tensor::describe() const {
  return fmt::format("{}[{}]", name_of(dtype_),
                     fmt::join(shape_.begin(), shape_.begin() + dims_, ", "));
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64 + 64;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
  if (!memory) throw std::bad_alloc();
  std::memset(memory, 0, rounded);
  data_.reset(memory);
}

void Buffer::Free::operator()(std::byte* p) const {
  std::free(p);
}

Tensor Buffer::view(DType dtype, std::initializer_list<int64_t> shape, size_t offset) const {
  const Tensor tensor(data_.get() + offset, dtype, shape);
  if (offset + tensor.bytes() > bytes_) {
    throw InvalidArgument(
        fmt::format("view {} at byte {}: buffer has {} bytes", tensor.describe(), offset, bytes_));
  }
  return tensor;
}

}  // namespace tandem
