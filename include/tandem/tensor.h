// Tensor: a non-owning view of memory (shape, strides, dtype, device). Memory: owning memory of a
// device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "tandem/dtype.h"
#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

constexpr int kMaxDims = 4;

/// `const float*` and other pointers to const.
template <typename P>
concept ConstPointer = std::is_pointer_v<P> && std::is_const_v<std::remove_pointer_t<P>>;

/// View of memory: trivially copyable, never owns. Strides count elements. Zero-sized dimensions
/// are valid.
///
/// A view of const memory is read-only, as are views made of it: operators and collectives accept
/// it as an input; as an output they refuse it by name.
class Tensor {
 public:
  using Extents = std::initializer_list<int64_t>;

  Tensor() = default;
  /// Row-major view of `data`. Throws InvalidArgument for a negative dimension, more than kMaxDims,
  /// or a byte count beyond int64_t.
  Tensor(void* data, DType dtype, Extents shape, Device device = {});
  Tensor(void* data, DType dtype, std::span<const int64_t> shape, Device device = {});
  /// View with strides, one per dimension, none negative; a stride of 0 repeats the same elements.
  Tensor(void* data, DType dtype, Extents shape, Extents strides, Device device = {});
  Tensor(void* data, DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides,
         Device device = {});
  /// Read-only views of const memory, with the same arguments.
  template <ConstPointer P, typename... Layout>
  Tensor(P data, DType dtype, Extents shape, const Layout&... layout)
      : Tensor(writable(data), dtype, shape, layout...) {
    read_only_ = true;
  }
  template <ConstPointer P>
  Tensor(P data, DType dtype, Extents shape, Extents strides, Device device = {})
      : Tensor(writable(data), dtype, shape, strides, device) {
    read_only_ = true;
  }
  template <ConstPointer P, typename... Layout>
  Tensor(P data, DType dtype, std::span<const int64_t> shape, const Layout&... layout)
      : Tensor(writable(data), dtype, shape, layout...) {
    read_only_ = true;
  }

  /// Row-major view of all of `values`, in the dtype of T: Tensor::of(std::span(vector), {2, 3}).
  /// Throws InvalidArgument unless the shape has exactly as many elements.
  template <typename T, size_t kExtent>
  requires TensorElement<std::remove_const_t<T>>
  static Tensor of(std::span<T, kExtent> values, Extents shape) {
    const Tensor tensor(values.data(), dtype_of<std::remove_const_t<T>>(), shape);
    tensor.require_elements(values.size());
    return tensor;
  }
  /// Row-major view of memory on any device, in the dtype of T.
  template <typename T>
  requires TensorElement<std::remove_const_t<T>>
  static Tensor of(T* data, Extents shape, Device device = {}) {
    return Tensor(data, dtype_of<std::remove_const_t<T>>(), shape, device);
  }

  void* data() const { return data_; }
  /// `data()` as T*, without a check of dtype or constness.
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  /// `data()` as T*. Throws InvalidArgument unless T is the dtype's C++ type, and const if the view
  /// is read-only.
  template <typename T>
  T* data_as() const {
    require_type(dtype_of<std::remove_const_t<T>>(), std::is_const_v<T>);
    return as<T>();
  }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool read_only() const { return read_only_; }
  int dims() const { return dims_; }
  int64_t dim(int i) const { return shape_[size_t(i < 0 ? i + dims_ : i)]; }
  int64_t stride(int i) const { return strides_[size_t(i < 0 ? i + dims_ : i)]; }
  int64_t elements() const;
  size_t bytes() const { return size_t(elements()) * size_of(dtype_); }
  bool contiguous() const;

  /// Elements [begin, begin + count) of dimension `dim`; a negative `dim` counts from the last.
  /// Throws InvalidArgument if out of range.
  Tensor narrow(int dim, int64_t begin, int64_t count) const;
  /// Rows [begin, begin + count) of dimension 0. Throws InvalidArgument if out of range.
  Tensor rows(int64_t begin, int64_t count) const;
  /// View with dimensions 0 and 1 swapped (no data moves).
  Tensor transposed() const;
  /// Read-only view of the same memory.
  Tensor as_read_only() const;
  /// "bf16[128, 64]", for messages.
  std::string describe() const;

 private:
  template <ConstPointer P>
  static void* writable(P data) {
    return const_cast<void*>(static_cast<const void*>(data));
  }
  void require_elements(size_t count) const;
  void require_type(DType dtype, bool is_const) const;
  void require_countable() const;

  void* data_ = nullptr;
  std::array<int64_t, kMaxDims> shape_{};
  std::array<int64_t, kMaxDims> strides_{};
  int dims_ = 0;
  DType dtype_ = DType::f32;
  bool read_only_ = false;
  Device device_{};
};

/// Owning memory on a device, zero-initialized, aligned to at least 64 bytes. Movable.
class Memory {
 public:
  Memory() = default;
  /// Host memory, or memory of the GPU `device`, which must be the calling rank's. Throws
  /// DeviceError if the GPU has too little left; Unsupported in a build without CUDA.
  explicit Memory(size_t bytes, Device device = {});
  Memory(Memory&&) noexcept = default;
  Memory& operator=(Memory&&) noexcept = default;

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Row-major view from byte `offset`. Throws InvalidArgument if it does not fit.
  Tensor view(DType dtype, std::initializer_list<int64_t> shape, size_t offset = 0) const;

 private:
  std::shared_ptr<std::byte> data_;
  size_t bytes_ = 0;
  Device device_;
};

}  // namespace tandem
TANDEM_API_END
