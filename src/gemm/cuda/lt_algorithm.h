// An algorithm of cuBLASLt, or our fallback, as chosen for a GEMM.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <mutex>

#include "gemm/gemm_choice.h"

namespace tandem::gpu {

/// Throws DeviceError unless `code` is success.
void check(cublasStatus_t code, const char* what);

struct Chosen {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  double us;
};

/// Algorithm of a shape's GEMMs, which read it at each call.
class Selected {
 public:
  explicit Selected(const Chosen& chosen) : chosen_(chosen) {}
  Chosen get() const {
    const std::lock_guard lock(mutex_);
    return chosen_;
  }
  void set(const Chosen& chosen) {
    const std::lock_guard lock(mutex_);
    chosen_ = chosen;
  }

 private:
  mutable std::mutex mutex_;
  Chosen chosen_;
};

/// Attributes that identify the algorithm.
GemmChoice choice_of(const Chosen& chosen);

/// The fallback kernel (simple_gemm.h) instead of an algorithm of the library.
Chosen simple();
bool is_simple(const Chosen& chosen);

}  // namespace tandem::gpu
