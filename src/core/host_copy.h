// Host view of f32 values on any device, for code that reads and writes files.
#pragma once

#include <span>
#include <vector>

#include "core/exec.h"

namespace tandem {

class HostCopy {
 public:
  /// `values`: f32, contiguous, on the host or on exec's device. In host memory no copy is made.
  HostCopy(const Exec& exec, const Tensor& values);
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  std::span<float> values() const { return values_; }
  /// Writes the copy back.
  void store() const;

 private:
  Exec exec_;
  Tensor device_values_;
  std::vector<float> copy_;
  std::span<float> values_;
};

}  // namespace tandem
