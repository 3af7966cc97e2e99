// Overlap operators: a GEMM and its adjacent collective as one call, overlapped tile by tile (FLUX,
// arXiv 2406.06858, §3). Construction is collective: it checks shapes against the other ranks,
// allocates symmetric workspace and picks a strategy. Runs allocate nothing, except on GPUs for the
// CUDA graphs mentioned below.
//
// Common to all: M, N and K are arbitrary (tails, M smaller than the world, zero rows). Rows are
// split by shard_of(). f32 or bf16 with f32 accumulation. Partial sums are added in f32 in a fixed
// order: bitwise equal on every run. A weight is [N, K] (rows = output features). For the other
// layout the shape sets weight_kn, and `run` gets `w.transposed()` of a [K, N] tensor. `run` gets a
// bias if and only if the shape sets it. On CPU ranks every strategy and chunk count gives the same
// bits, so results do not depend on the tuner's choice. (With neither AVX-512 nor AVX2 this holds
// as long as the tuner's cache is kept: the bits of the f32 GEMM then depend on the number of rows
// in a chunk.) An operator can be moved; calls on a moved-from operator throw InvalidArgument. It
// must be destroyed before its communicator, unless that belongs to a World: then the operator
// keeps it alive.
//
// Operands: rows are dense (the weight's, or its columns) and may be part of a wider matrix.
// Outputs, i.e. out and AddNorm's hidden, overlap no other operand; only hidden may be the
// residual. Inputs may overlap each other. An operand's memory reaches from its first element to
// its last, so adjacent columns of one matrix overlap. An operand that contradicts the shape, is on
// another device, overlaps, or is a read-only output throws InvalidArgument, which names it, before
// anything is sent. Construction with different shapes throws Mismatch. A call that fails later
// (out of memory, a Timeout) may leave different results on the ranks. Later calls of the operator
// then throw Aborted on that rank and, unless the error was a Timeout, the waits of all ranks end
// too.
//
// With OverlapOptions::wire rows are sent encoded (tandem/codec.h). On CPU ranks each row is a
// message of its own, and every strategy and chunk count still gives the same bits. AgGemm and
// AgWgrad encode x's rows once, on their owner. All ranks, including the owner, use the decoded
// rows, so the gathered matrix has the same bits everywhere. GemmRs encodes partial products except
// the owner's. GemmAr encodes all partial products, sent or not, and then the rounded sums, so each
// value twice; the residual of an AddNorm is added to the decoded sums. A single rank sends and
// encodes nothing.
//
// On GPUs of one node AgGemm, GemmRs and GemmAr accept the formats that have groups. GemmAr is the
// all-reduce of tandem/collectives.h: an owner's partial product is added uncompressed, and on two
// ranks each is encoded once and the sum is not. A shard's rows are one message there, so if a row
// is no multiple of the group, groups continue in the next row. Candidates differ in bits: fused
// GemmRs encodes partial products before they are rounded, and fused AgGemm uses local rows
// uncompressed (so it has no keep_gathered).
//
// On GPUs (a communicator of run_gpus, tandem/cuda.h) operands are contiguous, 16-byte aligned
// device tensors. out has the dtype given in the shape, f16 is valid too, N and K are multiples of
// 16 bytes, and M, N and K are at most 2^30. `run` enqueues on the communicator's stream and
// returns. Candidates round differently, so the bits depend on the tuner's choice, which is the
// same on all ranks. Operands are read when the call runs; after that the caller may refill, reuse
// or free their memory. Candidates of many steps are captured as a CUDA graph when the same
// operands are passed a second time; new operands cost more host time. A caller may capture calls
// itself.
//
// Kernels of one call wait for those of the same call on the other ranks. So the calls of all
// operators and collectives on a rank must be ordered, by one stream or by events, in the same
// order on all ranks. If two may run concurrently, the first may fill one rank's SMs and the second
// another's, and both time out. Kernels that end without waiting for a peer may run concurrently on
// other streams; the SMs they hold only delay a call, as long as that is less than the deadline.
// After a Timeout or Aborted the communicator is unusable, and the results of calls enqueued later
// are undefined.
//
// Backward passes use these operators too. AgGemm with weight w: dx by GemmRs of dy and
// w.transposed() (k and n exchanged, weight_kn); dw by AgWgrad, or by a GEMM with the saved gather.
// GemmRs: dx by AgGemm of dy and w.transposed(); dw.transposed() by AgWgrad of dy and x (k and n
// exchanged, weight_kn), or by a GEMM with the rows which that AgGemm saved.
//
// e4m3 (tandem/quantize.h), on the GPUs of one node: x and weight are e4m3, N and K multiples of
// 16, the weight is [N, K], and `run` gets their scales: out = (x scaled) x (weight scaled)^T +
// bias, in f32, rounded to `out_dtype`. The shape's scaling selects one scale per tensor, or one
// per row of x and of the weight. With one per tensor, all ranks of AG+GEMM must pass the same for
// x. AG transfers the codes (half the bytes of bf16) and the rows' scales; RS and AR transfer
// `out_dtype`. There is no keep_gathered and no AgWgrad.
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
  /// x: [shard rows, k]; dy: [m, n]; dw: f32 [n, k], accumulated into; with weight_kn
  /// `dw.transposed()` of a [k, n] tensor.
  void run(const Tensor& x, const Tensor& dy, const Tensor& dw);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

}  // namespace tandem
TANDEM_API_END
