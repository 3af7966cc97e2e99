// A Mixture-of-Experts layer with its communication under its products (COMET, arXiv 2502.19811).
// Rows travel to the ranks that hold their experts, go through those (SwiGLU MLPs), and come back
// as weighted sums. The caller (a router) chooses the experts of a row. No row is dropped and none
// is padded: an expert, a rank or a call without rows is valid.
//
// The communicator's ranks are ep x tp, with ep = size / tp: rank r has part shard_of(ffn, tp, r %
// tp) of each expert in shard_of(experts, ep, r / tp). Every rank brings rows of its own (their
// number may differ by rank and by call) and gets their results.
//
// A row crosses once per destination rank, however many of its experts that rank holds, and comes
// back from there as one partial sum. Sums have one fixed order in f32: bitwise equal on every run.
// Construction is collective. Unless a strategy is given, it measures when products should begin
// (after all rows have arrived, which is serial, or wave by wave as they do) and when sums should
// leave (after all products, or one group of columns after the other). It does so for evenly spread
// rows and for uneven ones (schedule/moe.h). A call takes what was fastest at the imbalance nearest
// to its own.
//
// On GPU ranks (one node of up to 8 GPUs of sm_90; bf16 or f16; hidden a multiple of 8, ffn of 8 x
// tp; up to 1024 experts a rank; wire formats with groups) passes are enqueued on the rank's stream
// (tandem/cuda.h). The host waits for nothing: grids depend on `tokens` alone, so one captured CUDA
// graph serves any routing. So routing throws nothing: a choice that is no expert, that its row has
// already, or whose weight is not finite contributes nothing and is counted (`refused_choices`). A
// Timeout of "all_to_all" names a rank that does not come, or whose operands do not fit. Ranks in
// different calls (forward and backward, batches of different calls, different layers) compute
// nothing: their next call or wait throws Mismatch, and the communicator has failed. The
// strategy is the fastest for evenly spread rows; all have the same bits. A backward pass needs
// MoeOptions::backward and travels serially. A batch's first forward pass allocates, so it cannot
// be captured.
//
// With a wire format (MoeOptions) the forward pass sends rows to the experts encoded, each as a
// message (tandem/codec.h). All ranks use the decoded rows, also those that stay, so which ranks
// share an expert does not show in its input. Partial sums come back encoded; the owner adds its
// own as they are. Strategies and chunks give the same bits. A single rank encodes nothing. The
// backward pass travels plain. Its gradients are those of a layer given the decoded rows, with
// exact partial sums. GPU ranks send the same messages, and with `or_plain` choose plain or encoded
// for both directions together.
//
// Memory of a layer, on each rank: 8 x size x tokens rows (symmetric and staging, twice for calls
// in turn), whatever the routing; scratch that grows to what a call's rows need; and with a wire
// for partial sums 2 x size x tokens of their messages.
//
// Memory on a GPU is shared by all layers of a communicator that have the same shape and options,
// but for their batches: their calls follow each other on one stream. It is: symmetric, 2 x (size -
// 1) x tokens rows and size x tokens x top_k x 8 bytes. Then hidden + this rank's part of ffn
// values for each row that its experts may be given, which is size x tokens x min(top_k, local
// experts) and 127 more per expert. With a backward pass: size x tokens x top_k x 4 bytes,
// symmetric; 2 x hidden + 3 x ffn values for each of those rows; and hidden + 2 x ffn for each row
// in every batch. In a wire format a direction's (size - 1) x tokens symmetric rows are messages of
// Wire::bytes(hidden) instead (with a backward pass or `or_plain`: the longer of the two), and for
// rows to the experts there are, not symmetric, tokens messages and size x tokens decoded rows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {
class MoeRows;     // internal
class MoeOnRanks;  // internal
}  // namespace tandem

TANDEM_API_BEGIN
namespace tandem {

struct MoeShape {
  int64_t tokens = 0;        ///< the most rows that any rank brings
  int64_t hidden = 0;        ///< features of a row
  int64_t ffn = 0;           ///< width inside one whole expert
  int experts = 1;           ///< of all ranks; a multiple of size / tp
  int top_k = 1;             ///< experts of a row
  int tp = 1;                ///< ranks that share each expert; divides the communicator's size
  DType dtype = DType::f32;  ///< of rows and weights: f32 or bf16; on GPUs bf16 or f16
};

struct MoeOptions {
  Strategy strategy = Strategy::automatic;
  int chunks = 0;         ///< of each stage when overlapped; 0: chosen, as always on GPUs
  Wire dispatch = {};     ///< what rows travel to their experts as
  Wire combine = {};      ///< what their partial sums travel back as
  bool or_plain = false;  ///< plain rows are timed, too, and the fastest is taken (`automatic`)
  /// GPU ranks: forward passes fill their batch for a backward pass, which costs a little time and
  /// the batch's memory. CPU ranks always do.
  bool backward = false;
};

/// Where this rank's rows go. The experts of one row differ.
struct MoeRouting {
  Tensor experts;  ///< i32 [rows, top_k]
  Tensor weights;  ///< f32 [rows, top_k]
};

/// What a forward pass leaves for its backward pass: where rows went, what this rank's experts were
/// given and computed. Its memory grows to what the largest call needs and is then used again.
class MoeBatch {
 public:
  MoeBatch();
  ~MoeBatch();
  MoeBatch(MoeBatch&&) noexcept;
  MoeBatch& operator=(MoeBatch&&) noexcept;
  /// Rows that each of this rank's experts computed; empty on GPU ranks, whose host learns none.
  std::span<const int64_t> rows_of_experts() const;

 private:
  friend class MoeLayer;
  std::unique_ptr<MoeRows> rows_;
};

class MoeLayer {
 public:
  /// Collective. Throws InvalidArgument for a shape that is not possible, Mismatch where ranks
  /// differ in it, Unsupported for what GPU ranks do not have.
  MoeLayer(Communicator& comm, const MoeShape& shape, const MoeOptions& options = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// out[t] = sum over k of weights[t, k] x expert experts[t, k] of x[t]. x: [rows, hidden]; out:
  /// [rows, hidden], the shape's dtype or f32, rows <= tokens. w_in: [local experts x 2 x ffn part,
  /// hidden], for each expert the rows of the gate, then those of the up projection; w_out: [local
  /// experts x hidden, ffn part]. If a rank routes a row to no expert of the shape, to one twice,
  /// or with a weight that is not finite (a router fed NaN), every rank throws Mismatch, which
  /// names that rank. A rank whose operands do not fit throws InvalidArgument, the others Mismatch
  /// that says the same. Then nothing is written to `out`, `batch` is as if never filled, and the
  /// layer remains usable. GPU ranks: as said above; without MoeOptions::backward `batch` is not
  /// filled.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeBatch& batch);

  /// The backward pass of the call that filled `batch`, which stays as it is. dout: [rows, hidden].
  /// Writes dx [rows, hidden] (the shape's dtype or f32) and dweights f32 [rows, top_k]; adds to
  /// dw_in and dw_out, f32, of the weights' shapes. Errors as of `forward`; also InvalidArgument
  /// for a batch that no forward pass of this layer filled, Mismatch on all where batches are of
  /// different calls or one rank goes forward. Then nothing is written or added. GPU ranks: if
  /// operands or batch do not fit, InvalidArgument there, Timeout on the others; Mismatch as said
  /// above.
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeBatch& batch,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                const Tensor& dw_out);

  /// GPU ranks: how many choices of this rank's rows were refused so far. Blocks until the rank's
  /// stream is empty.
  int64_t refused_choices() const;

  /// The choice for forward passes whose rows are evenly spread: before the experts, and after
  /// them.
  Strategy dispatch_strategy() const;
  Strategy combine_strategy() const;

 private:
  std::unique_ptr<MoeOnRanks> impl_;
};

}  // namespace tandem
TANDEM_API_END
