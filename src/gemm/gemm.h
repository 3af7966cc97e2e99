// GEMM of one rank: on its CPU threads (oneDNN, or our own for f32 without AVX-512 and for bf16
// with AMX) or its GPU (cuBLASLt).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/exec.h"

namespace tandem {

/// Whether a row of a GEMM has the same bits however many rows are multiplied with it. On a GPU
/// bits then depend on few_rows or many_rows; on a CPU, where rows_keep_bits(), on neither.
enum class SameBits : uint8_t {
  no,         ///< on a GPU, bits may depend on the number of rows
  few_rows,   ///< as in decode: at most kMaxFewRows rows
  many_rows,  ///< as in prefill: any number of rows, by one algorithm for all
};

constexpr int64_t kMaxFewRows = 64;

struct GemmOptions {
  const Tensor* bias = nullptr;  ///< [N], dtype of out
  bool accumulate = false;       ///< out += instead of out =
  /// The calls enqueued before this one do not write b: a GPU may read b before they have ended.
  bool reads_b_early = false;
  SameBits same_bits = SameBits::no;
};

/// out[M, N] = a[M, K] x b[K, N]. Strides express transposition: a weight stored [N, K] is passed
/// as `w.transposed()`. Each operand has one unit stride. a and b share a dtype (f32 or bf16);
/// out is f32 or that dtype; accumulation is f32. Zero-sized dimensions are valid (K = 0 gives 0 or
/// the bias). A row of the result has the same bits however many other rows are computed with it
/// (where rows_keep_bits()), and on every run. Throws InvalidArgument naming the operand whose
/// shape, stride or dtype is wrong.
void gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options = {});
/// On exec's device. On a GPU each operand is contiguous, or the transpose of a contiguous
/// matrix, at a multiple of 16 bytes and with rows that are multiples of 16 bytes, there is no
/// bias, and the first call with a shape, up to timed_gemm_rows (for many_rows: with an N and K),
/// times cuBLASLt's algorithms: the same bits on every later run of the process. With `same_bits`,
/// throws InvalidArgument for more than kMaxFewRows few rows, and Unsupported where it does not
/// hold: on CPUs without rows_keep_bits(), on GPUs before Hopper, and for few rows that are not
/// bf16 or whose K is not a multiple of 64.
void gemm(const Exec& exec, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options = {});

/// Whether the first GEMM of a shape times algorithms: on a GPU.
bool times_algorithms(const Exec& exec);

/// On a GPU, GEMMs of `rows` rows run the algorithm that is fastest with this many: at most 1/8
/// more, but at least 16, and from 17 on a multiple of 64.
constexpr int64_t timed_gemm_rows(int64_t rows) {
  if (rows <= 16) return 16;
  const int64_t unit = std::max<int64_t>(64, int64_t(std::bit_floor(uint64_t(rows - 1))) / 8);
  return (rows + unit - 1) / unit * unit;
}

/// out[M, F] = silu(a x gate^T) * (a x up^T) for weight = [gate | up], [2 F, K], in one kernel,
/// with the bits of gemm in out's dtype and swiglu_forward (kernels/swiglu.h). A GPU may read the
/// weight before the calls enqueued before this one have ended. False, and nothing is done, if
/// there is no such kernel: for all but a few rows of bf16 on a GPU, and for SameBits::many_rows.
bool gemm_swiglu(const Exec& exec, const Tensor& a, const Tensor& weight, const Tensor& out,
                 SameBits same_bits = SameBits::no);

/// True if a row of a GEMM has the same bits however many rows are computed with it. False if
/// oneDNN finds no AVX-512 and this build may not use AVX2 (gemm/cpu/ordered_gemm.h).
bool rows_keep_bits();

/// Sets the number of threads that this thread's kernels use: 1 if it has lost its thread team
/// (core/system/process/fork.h).
void set_kernel_threads(int threads);
int kernel_threads();

/// Number of threads that this thread's kernels use, until it ends. A rank holds one: ranks as
/// threads share the machine.
class KernelThreads {
 public:
  explicit KernelThreads(int threads) : before_(kernel_threads()) { set_kernel_threads(threads); }
  ~KernelThreads() { set_kernel_threads(before_); }
  KernelThreads(const KernelThreads&) = delete;
  KernelThreads& operator=(const KernelThreads&) = delete;

 private:
  int before_;
};

}  // namespace tandem
