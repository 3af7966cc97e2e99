// Tensor: a non-owning view of memory (shape, strides, dtype, device). Buffer: owning memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "tandem/dtype.h"

namespace tandem {

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

constexpr int kMaxDims = 4;

/// A view: trivially copyable, never owns. Strides count elements. Zero-sized dimensions are valid.
class Tensor {
 public:
  Tensor() = default;
  /// Row-major over `data`. Throws InvalidArgument for a negative dimension or more than kMaxDims.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});
  Tensor(void* data, DType dtype, std::span<const int64_t> shape, Device device = {});

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int dims() const { return dims_; }
  int64_t dim(int i) const { return shape_[size_t(i < 0 ? i + dims_ : i)]; }
  int64_t stride(int i) const { return strides_[size_t(i < 0 ? i + dims_ : i)]; }
  int64_t elements() const;
  size_t bytes() const { return size_t(elements()) * size_of(dtype_); }
  bool contiguous() const;

  /// Rows [begin, begin + count) of dimension 0. Throws InvalidArgument when out of range.
  Tensor rows(int64_t begin, int64_t count) const;
  /// Dimensions 0 and 1 swapped (no data moves).
  Tensor transposed() const;
  /// "bf16[128, 64]", for messages.
  std::string describe() const;

 private:
  void* data_ = nullptr;
  std::array<int64_t, kMaxDims> shape_{};
  std::array<int64_t, kMaxDims> strides_{};
  int dims_ = 0;
  DType dtype_ = DType::f32;
  Device device_{};
};

/// Owning, 64-byte aligned, zero-initialised host memory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  /// A row-major view from byte `offset`. Throws InvalidArgument when it does not fit.
  Tensor view(DType dtype, std::initializer_list<int64_t> shape, size_t offset = 0) const;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace tandem
