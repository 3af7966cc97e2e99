// Overlap operators: a GEMM and the collective beside it as one call, tile by tile (FLUX,
// arXiv 2406.06858, §3). Construct once (collective: checks shapes against the other ranks,
// allocates symmetric workspace, picks a strategy), run many times (no allocation, but on GPUs for
// the CUDA graphs mentioned below).
//
// Common to all: M, N, K are arbitrary (tails, M smaller than the world, zero rows). Rows are split
// by shard_of(). f32 or bf16 with f32 accumulation. Partial sums are added in a fixed order in f32:
// bitwise equal on every run. A weight is [N, K] (rows = output features); for the other layout the
// shape says weight_kn and `run` gets `w.transposed()` of a [K, N] tensor. A bias comes if the
// shape says so, and only then. On CPU ranks every strategy and chunk count gives the same bits, so
// what the tuner chooses never shows in a result (on processors without AVX-512 that holds as long
// as the tuner's cache is kept: there the f32 GEMM's bits depend on how many rows a chunk has). An
// operator can be moved, calls of what was moved from throw InvalidArgument, and it must be
// destroyed before its communicator, unless that is a World's, which it keeps.
//
// Operands: rows are dense (the weight's, or its columns) and may be part of a wider matrix. What a
// call writes, out and AddNorm's hidden, overlaps no other operand, but for a hidden that is the
// residual; inputs may overlap each other. An operand's memory is all from its first element to its
// last, so that columns beside each other of one matrix overlap. What contradicts the shape, lies
// elsewhere, overlaps or is read-only and written throws InvalidArgument naming it before anything
// is sent; ranks that construct with different shapes get Mismatch. A call that fails later (no
// memory, a Timeout) may leave the ranks' parts uneven: the operator's later calls throw Aborted on
// that rank, and unless it was a Timeout, the waits of all ranks end with it, too.
//
// With OverlapOptions::wire rows travel encoded (tandem/codec.h). On CPU ranks each is a message of
// its own, and every strategy and chunk count still gives the same bits. AgGemm and AgWgrad:
// x's rows, encoded once by their owner. All ranks, the owner too, use them as decoded, so what is
// gathered has the same bits everywhere. GemmRs: partial products but the owner's own. GemmAr: all
// partial products, whether they travel or not, and then the rounded sums, so each value is encoded
// twice; the residual of an AddNorm is added to what the sums decode as. A single rank sends and
// encodes nothing.
//
// On GPUs of one node AgGemm, GemmRs and GemmAr take the formats that have groups. What GemmAr does
// is the all-reduce of tandem/collectives.h: an owner's partial product counts as it is, and on two
// ranks each is encoded once and the sum is not. Codes of a shard's rows count as one message
// there, so where a row is no multiple of the group, groups go on in the next row. Candidates
// differ in their bits: GemmRs's fused one encodes partial products before they are rounded, and
// AgGemm's uses the own rows as they are (there is none with keep_gathered).
//
// On GPUs (a communicator of run_gpus, tandem/cuda.h) operands are contiguous, 16-byte aligned
// device tensors, out has the dtype that the shape says, f16 is valid too, and N and K are
// multiples of 16 bytes. `run` enqueues on the communicator's stream and returns. M, N and K are at
// most 2^30. Ways round differently: there the bits depend on the tuner's choice, which is the same
// on all ranks. Operands are read when the call runs, and their memory is the caller's to refill,
// reuse or free once it has. Ways of many steps are captured as a CUDA graph when the same operands
// come a second time: calls with new ones cost the host more. A caller may capture calls in a graph
// of its own.
//
// Kernels of one call wait for those of the same call on the other ranks. So calls of all operators
// and collectives on a rank must be ordered, by one stream or by events, in the same order on all
// ranks: where two may run at once, one rank's SMs may be full of the first and another's of the
// second, and both time out. Whatever ends by itself may run beside them on other streams; SMs that
// it holds only delay a call, as long as that is less than the deadline. After a Timeout or Aborted
// the communicator is of no more use, and results of calls that were enqueued behind are undefined.
//
// Backward passes are these operators too. Of AgGemm with weight w: dx by GemmRs of dy and
// w.transposed() (k and n exchanged, weight_kn), dw by AgWgrad, or by a product with the kept
// gather. Of GemmRs: dx by AgGemm of dy and w.transposed(), and dw.transposed() by AgWgrad of dy
// and x (k and n exchanged, weight_kn), or by a product with what that AgGemm kept.
//
// e4m3 (tandem/quantize.h), on the GPUs of one node: x and weight are e4m3, N and K multiples of
// 16, the weight [N, K], and `run` gets their scales: out = (x scaled) x (weight scaled)^T + bias,
// in f32, rounded to `out_dtype`. The shape's scaling says whether they are one per tensor or one
// per row of x and of the weight; AG+GEMM with one per tensor takes the same for x on every rank.
// AG moves the codes (half the bytes of bf16) and the rows' scales; RS and AR move `out_dtype`.
// There is no keep_gathered and no AgWgrad.
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
class OverlapOperator;  // internal: one on CPU ranks or on GPUs
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
    bool bias = false;                  ///< whether `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< f32: out and bias are f32; e4m3: bf16, f16 or f32
    Scaling scaling = Scaling::tensor;  ///< e4m3
  };
  AgGemm(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~AgGemm();
  AgGemm(AgGemm&&) noexcept;
  AgGemm& operator=(AgGemm&&) noexcept;
  /// x: [shard_of(m, size, rank).count, k]; out: [m, n], of the shape's dtype or its out_dtype f32;
  /// on CPU ranks always f32, too. `scales`: with e4m3, and only then.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr);
  /// [m, k]; only with keep_gathered.
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
    bool bias = false;                  ///< whether `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< f32: out and bias are f32; e4m3: bf16, f16 or f32
    Scaling scaling = Scaling::tensor;  ///< e4m3
  };
  GemmRs(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~GemmRs();
  GemmRs(GemmRs&&) noexcept;
  GemmRs& operator=(GemmRs&&) noexcept;
  /// x: [m, k]; out: [shard rows, n], of the shape's dtype or its out_dtype f32; on CPU ranks
  /// always f32, too. Partial products travel in the shape's dtype, on GPUs in the out_dtype where
  /// that is f32, as with e4m3. `scales`: with e4m3, and only then.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

/// out[M, N] = the sum over ranks of x[M, K] x weight[N, K]^T, + bias[N]; the same bits everywhere.
/// Partial products and the result have the shape's dtype.
///
/// With add_norm the sum goes on into a residual stream and out is its RMSNorm (tandem/norm.h):
/// where kernels or CPU ranks of ours add the partial products, the residual is added to that sum
/// in f32, before anything is rounded; NCCL's sum, and the product of a single rank, are rounded
/// first.
class GemmAr {
 public:
  /// k: this rank's input features (may differ by rank).
  struct Shape {
    int64_t m, n, k;
    DType dtype = DType::f32;
    bool bias = false;                  ///< whether `run` gets one
    bool weight_kn = false;             ///< `run` gets `w.transposed()` of a [K, N] tensor
    DType out_dtype = DType::bf16;      ///< e4m3: of out, bias and partial products
    Scaling scaling = Scaling::tensor;  ///< e4m3
    bool add_norm = false;              ///< whether `run` gets one
  };
  GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~GemmAr();
  GemmAr(GemmAr&&) noexcept;
  GemmAr& operator=(GemmAr&&) noexcept;
  /// x: [m, k]; out: [m, n]. `scales`: with e4m3, and only then. `add_norm`: if the shape says so.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr, const AddNorm* add_norm = nullptr);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

/// Weight gradient of AgGemm without a kept gather: dw[N, K] += dy[M, N]^T x all-gather(x)[M, K],
/// accumulated as the rows arrive: shard by shard, on CPU ranks in up to three pieces of each.
class AgWgrad {
 public:
  using Shape = AgGemm::Shape;
  AgWgrad(Communicator& comm, const Shape& shape, const OverlapOptions& options = {});
  ~AgWgrad();
  AgWgrad(AgWgrad&&) noexcept;
  AgWgrad& operator=(AgWgrad&&) noexcept;
  /// x: [shard rows, k]; dy: [m, n]; dw: f32 [n, k], added to; with weight_kn
  /// `dw.transposed()` of a [k, n] tensor.
  void run(const Tensor& x, const Tensor& dy, const Tensor& dw);
  Strategy strategy() const;

 private:
  std::unique_ptr<OverlapOperator> impl_;
};

}  // namespace tandem
TANDEM_API_END
