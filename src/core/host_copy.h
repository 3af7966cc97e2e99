// Host view of f32 values on any device, for code that reads and writes files.
#pragma once

#include <iterator>
#include <span>
#include <vector>

#include "core/exec.h"

namespace tandem {

/// Values of a contiguous f32 tensor in host memory.
std::span<float> host_values(const Tensor& values);
/// View of an array or vector, [elements].
template <typename Values>
Tensor host_tensor(Values&& values) {
  return Tensor::of(std::span(values), {int64_t(std::size(values))});
}

class HostCopy {
 public:
  /// `values`: f32, contiguous, on the host or on exec's device. In host memory no copy is made.
  HostCopy(const Exec& exec, const Tensor& values);
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  std::span<float> values() const { return host_values(host_); }
  /// The values as a tensor, f32 [elements].
  const Tensor& tensor() const { return host_; }
  /// Writes the copy back.
  void store() const;

 private:
  Exec exec_;
  Tensor device_values_, host_;
  std::vector<float> copy_;
};

}  // namespace tandem
