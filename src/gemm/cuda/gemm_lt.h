// GEMM on one GPU through cuBLASLt. The algorithm is chosen by timing the library's suggestions
// once per shape and process, unless an earlier choice is given. GEMMs whose number of rows is
// different from call to call run the algorithm of a similar number (timed_gemm_rows in
// gemm/gemm.h); with GemmShape::same_bits, all numbers run one.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <optional>

#include "core/cuda/handles.h"
#include "gemm/cuda/scale.h"
#include "gemm/gemm_choice.h"
#include "tandem/quantize.h"

namespace tandem::gpu {

struct GemmShape {
  int64_t m, n, k;
  DType in = DType::bf16;     ///< dtype of x and weight: bf16, f16, f32 or e4m3
  DType out = DType::bf16;    ///< `in`, or f32; for e4m3: bf16, f16 or f32
  bool weight_is_kn = false;  ///< weight stored [K, N] instead of [N, K]; not e4m3
  bool bias = false;          ///< [N], dtype of out
  std::optional<Scaling> scaling = std::nullopt;  ///< e4m3 only; none: scales of 1
  bool x_is_km = false;                           ///< x stored [K, M] instead of [M, K]
  bool accumulate = false;                        ///< added to out instead of stored
  bool same_bits = false;  ///< a row's bits do not depend on m: one algorithm for every m
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

/// out[M, N] = x[M, K] x weight + bias, f32 accumulation; deterministic. M and N may be 0, as may K
/// if the result is added to out: such calls do nothing. e4m3 is multiplied with partial sums
/// promoted to full f32 ("fast accumulation" off: the tensor cores only keep 14 bits).
class LtGemm {
 public:
  /// Times candidates on the current device unless this shape was timed before. Throws
  /// InvalidArgument for dtypes, or for rows that are not multiples of 16 bytes; Unsupported if
  /// cuBLASLt has no algorithm for e4m3. Other dtypes then run a fallback kernel of our own.
  LtGemm(const LtContext& context, const GemmShape& shape);
  /// Runs the algorithm that is fastest with `timed_m` rows, at least shape.m. With
  /// shape.same_bits it may be less: the fastest algorithm without splits of K that gave rows the
  /// same bits with fewer of them. `before`: called before anything is launched to time or load it.
  LtGemm(const LtContext& context, const GemmShape& shape, int64_t timed_m,
         const std::function<void()>& before);
  ~LtGemm();
  LtGemm(LtGemm&&) noexcept;

  void run(const void* x, const void* weight, void* out, const void* bias, cudaStream_t stream,
           const ScalePointers& scales = {}) const;
  /// Replaces out by the product, with the bits of one added to 0. For a GEMM that accumulates and
  /// was made for this number of rows.
  void store(const void* x, const void* weight, void* out, cudaStream_t stream) const;

 private:
  struct State;
  std::unique_ptr<State> state_;

  friend void adopt_gemm_choices(const LtContext& context, const GemmChoices& choices);
};

/// Prefix of the keys of choices that this library understands.
std::string gemm_choice_prefix();
/// Makes GEMMs created from now on use these choices, if the library still suggests them.
void keep_gemm_choices(const GemmChoices& choices);
/// Current choices of the GEMMs that this process has timed, starting at number `first`.
struct TimedChoices {
  GemmChoices choices;
  size_t end;
};
TimedChoices timed_gemm_choices(size_t first);
/// Makes existing and future GEMMs use these choices. No GEMM affected may be running.
void adopt_gemm_choices(const LtContext& context, const GemmChoices& choices);

}  // namespace tandem::gpu
