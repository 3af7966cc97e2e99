// Matrix product on one GPU through cuBLASLt, with the algorithm chosen by timing the library's own
// suggestions once per shape and process, unless one is given that was chosen before.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "core/cuda/handles.h"
#include "gemm/cuda/scale.h"
#include "gemm/gemm_choice.h"
#include "tandem/quantize.h"

namespace tandem::gpu {

struct GemmShape {
  int64_t m, n, k;
  DType in = DType::bf16;     ///< of x and weight: bf16, f16, f32 or e4m3
  DType out = DType::bf16;    ///< the same, or f32; of e4m3: bf16, f16 or f32
  bool weight_is_kn = false;  ///< weight stored [K, N] instead of [N, K]; not e4m3
  bool bias = false;          ///< [N], dtype of out
  std::optional<Scaling> scaling = std::nullopt;  ///< e4m3: none stands for scales of 1
  bool x_is_km = false;                           ///< x stored [K, M] instead of [M, K]
  bool accumulate = false;                        ///< added to out instead of stored
  bool operator<(const GemmShape& other) const;
};

/// Handle and workspace of one rank. Its GEMMs run on one stream at a time.
class LtContext {
 public:
  LtContext();
  ~LtContext();
  LtContext(const LtContext&) = delete;
  LtContext& operator=(const LtContext&) = delete;
  cublasLtHandle_t handle() const { return handle_; }
  const DeviceMemory& workspace() const { return workspace_; }

 private:
  std::shared_ptr<GpuShare> share_;
  cublasLtHandle_t handle_ = nullptr;
  DeviceMemory workspace_;
};

/// out[M, N] = x[M, K] x weight + bias, f32 accumulation; deterministic. M and N may be 0, and K
/// where the product is added to out: then nothing happens. e4m3 is multiplied with partial sums
/// promoted to full f32 on the way ("fast accumulation" off: the tensor cores alone keep 14 bits).
class LtGemm {
 public:
  /// Throws InvalidArgument for dtypes, or for rows that are not multiples of 16 bytes; Unsupported
  /// where cuBLASLt has no algorithm for e4m3. Other products then run a plain kernel of our own.
  /// Times candidates on the current device unless this shape was timed before.
  LtGemm(const LtContext& context, const GemmShape& shape);
  ~LtGemm();
  LtGemm(LtGemm&&) noexcept;

  void run(const void* x, const void* weight, void* out, const void* bias, cudaStream_t stream,
           const ScalePointers& scales = {}) const;

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;

  friend void adopt_gemm_choices(const LtContext& context, const GemmChoices& choices);
};

/// What the keys of choices begin with that this library understands.
std::string gemm_choice_prefix();
/// Products that are made from now on take these, where the library still does.
void keep_gemm_choices(const GemmChoices& choices);
/// Of the products that this process has timed, from the number `first` on, what they take now.
struct TimedChoices {
  GemmChoices choices;
  size_t end;
};
TimedChoices timed_gemm_choices(size_t first);
/// Products take these from now on, those that are already made, too. Nothing of them runs.
void adopt_gemm_choices(const LtContext& context, const GemmChoices& choices);

}  // namespace tandem::gpu
