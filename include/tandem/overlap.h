// Overlap operators: a GEMM and its adjacent collective as one call, overlapped tile by tile (FLUX,
// arXiv 2406.06858, §3). Construction is collective: it checks shapes against the other ranks,
// allocates symmetric workspace and picks a strategy. Runs allocate nothing but CUDA graphs.
//
// M, N and K are arbitrary; rows are split by shard_of(); sums are in f32, in one order, bitwise
// equal on every run. A weight is [N, K], or with weight_kn `w.transposed()` of a [K, N] tensor.
// Operands that contradict the shape throw InvalidArgument before anything is sent, different
// shapes Mismatch; after a failed call later ones throw Aborted. An operator can be moved. It must
// be destroyed before its communicator, unless that belongs to a World. GPU ranks enqueue calls, in
// one order on all ranks. Aliases, wire formats, e4m3, graphs, backward passes:
// docs/reference/operators.md.
#pragma once

#include <memory>
#include <string>

#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/norm.h"
#include "tandem/quantize.h"
#include "tandem/strategy.h"
#include "tandem/tensor.h"

namespace tandem {
class OverlapOperator;  // internal: implementation on CPU ranks or on GPUs
}

TANDEM_API_BEGIN
namespace tandem {

/// out[M, N] = all-gather(x)[M, K] x weight[N, K]^T + bias[N].
class AgGemm {
 public:
  /// m: rows over all ranks; n: this rank's output features (may differ by rank); k: input
  /// features.
  struct Shape {
    int64_t m, n, k;
    DType dtype = DType::f32;
    bool keep_gathered = false;         ///< `gathered()` stays valid until the next run
    bool bias = false;                  ///< `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< f32: out and bias are f32; e4m3: bf16, f16 or f32
    Scaling scaling = Scaling::tensor;  ///< for e4m3 operands
  };
  AgGemm(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~AgGemm();
  AgGemm(AgGemm&&) noexcept;
  AgGemm& operator=(AgGemm&&) noexcept;
  /// x: [shard_of(m, size, rank).count, k]. out: [m, n], in the shape's dtype, or f32 if out_dtype
  /// is f32; CPU ranks always accept f32. `scales`: with e4m3 only.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr);
  /// Gathered x [m, k]; only with keep_gathered.
  Tensor gathered() const;
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

/// out = rows shard_of(m, size, rank) of the sum over ranks of x[M, K] x weight[N, K]^T, + bias[N].
class GemmRs {
 public:
  /// k: this rank's input features (may differ by rank).
  struct Shape {
    int64_t m, n, k;
    DType dtype = DType::f32;
    bool bias = false;                  ///< `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< f32: out and bias are f32; e4m3: bf16, f16 or f32
    Scaling scaling = Scaling::tensor;  ///< for e4m3 operands
  };
  GemmRs(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~GemmRs();
  GemmRs(GemmRs&&) noexcept;
  GemmRs& operator=(GemmRs&&) noexcept;
  /// x: [m, k]. out: [shard rows, n], in the shape's dtype, or f32 if out_dtype is f32; CPU ranks
  /// always accept f32. Partial products are sent in the shape's dtype; on GPUs with an f32
  /// out_dtype, and with e4m3, in the out_dtype. `scales`: with e4m3 only.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

/// out[M, N] = the sum over ranks of x[M, K] x weight[N, K]^T, + bias[N]; the same bits on every
/// rank. Partial products and the result have the shape's dtype.
///
/// With add_norm the sum is added to a residual stream, and out is its RMSNorm (tandem/norm.h). If
/// this library's kernels or CPU ranks add the partial products, the residual is added to that sum
/// in f32, before any rounding. NCCL's sum, and the GEMM of a single rank, are rounded first.
class GemmAr {
 public:
  /// k: this rank's input features (may differ by rank).
  struct Shape {
    int64_t m, n, k;
    DType dtype = DType::f32;
    bool bias = false;                  ///< `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< e4m3: of out, bias and partial products
    Scaling scaling = Scaling::tensor;  ///< for e4m3 operands
    bool add_norm = false;              ///< `run` gets one
  };
  GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~GemmAr();
  GemmAr(GemmAr&&) noexcept;
  GemmAr& operator=(GemmAr&&) noexcept;
  /// x: [m, k]; out: [m, n]. `scales`: with e4m3 only. `add_norm`: if the shape sets it.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr, const AddNorm* add_norm = nullptr);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

/// Weight gradient of AgGemm without a saved gather: dw[N, K] += dy[M, N]^T x all-gather(x)[M, K],
/// accumulated as the rows arrive: shard by shard, on CPU ranks in up to three chunks of each.
class AgWgrad {
 public:
  using Shape = AgGemm::Shape;
  AgWgrad(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~AgWgrad();
  AgWgrad(AgWgrad&&) noexcept;
  AgWgrad& operator=(AgWgrad&&) noexcept;
  /// x: [shard rows, k]; dy: [m, n]; dw: f32 [n, k], accumulated into, or, without `accumulate`,
  /// replaced, with the bits of a sum that begins at 0; with weight_kn `dw.transposed()` of a
  /// [k, n] tensor.
  void run(const Tensor& x, const Tensor& dy, const Tensor& dw, bool accumulate = true);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

}  // namespace tandem
TANDEM_API_END
