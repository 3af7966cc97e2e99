// Mixture-of-Experts layer whose communication overlaps its GEMMs (COMET, arXiv 2502.19811). Rows
// are dispatched to the ranks that hold their experts (SwiGLU MLPs) and combined as weighted sums.
// The caller (a router) chooses the experts of a row. No row is dropped or padded: an expert, a
// rank or a call without rows is valid.
//
// The communicator's ranks are ep x tp, with ep = size / tp: rank r has shard shard_of(ffn, tp, r %
// tp) of each expert in shard_of(experts, ep, r / tp). Every rank passes its own rows (their number
// may differ by rank and by call) and gets their results.
//
// A row is sent once per destination rank, however many of its experts that rank holds, and returns
// from there as one partial sum. Sums have one fixed order in f32: bitwise equal on every run.
// Construction is collective. Unless a strategy is given, it times when to start the GEMMs (serial:
// after all rows have arrived; or wave by wave as they arrive) and when to send the sums (after all
// GEMMs, or one column group after the other), for evenly spread and for uneven rows
// (schedule/moe.h). A call uses the fastest at the imbalance nearest to its own.
//
// GPU ranks (one node of up to 8 GPUs of sm_90; bf16 or f16; hidden a multiple of 8, ffn of 8 x tp;
// up to 1024 experts a rank; wire formats with groups) enqueue passes on the rank's stream
// (tandem/cuda.h). The host does not wait: grids depend on `tokens` only, so one captured CUDA
// graph serves any routing. Routing therefore throws nothing: an expert id that is out of range,
// repeated in its row, or has a weight that is not finite contributes nothing and is counted
// (`dropped_routings`). A Timeout of "all_to_all" names a rank that is missing or whose operands
// are invalid. Ranks in different calls (forward and backward, batches of different calls,
// different layers) compute nothing: their next call or wait throws Mismatch, and the communicator
// has failed. The strategy is the fastest for evenly spread rows; all strategies give the same
// bits. A backward pass needs MoeOptions::backward and its communication is serial. The first
// forward pass of a batch that is not prepared allocates, so it cannot be captured.
//
// With a wire format (MoeOptions) the forward pass encodes each row it dispatches as one message
// (tandem/codec.h). All ranks use the decoded rows, including those that stay local, so an expert's
// input does not depend on which ranks share it. Partial sums return encoded; the owner adds its
// own uncompressed. Strategies and chunks give the same bits. A single rank encodes nothing. The
// backward pass is uncompressed. Its gradients are those of a layer given the decoded rows, with
// exact partial sums. GPU ranks send the same messages, and with `allow_uncompressed` choose
// uncompressed or encoded for both directions together.
//
// Memory of a layer, on each rank: 8 x size x tokens rows (symmetric and staging, double-buffered
// across calls), whatever the routing; scratch that grows to the rows of a call; and, with a wire
// format for partial sums, 2 x size x tokens of their messages.
//
// GPU memory is shared by all layers of a communicator that have the same shape and options, except
// for their batches, since their calls are ordered by one stream. Symmetric: 2 x (size - 1) x
// tokens rows and size x tokens x top_k x 8 bytes. In addition, hidden + this rank's shard of ffn
// values for each row that its experts may receive: size x tokens x min(top_k, local experts), plus
// 127 per expert. With a backward pass: size x tokens x top_k x 4 bytes, symmetric; 2 x hidden + 3
// x ffn values for each of those rows; and hidden + 2 x ffn for each row in every batch. With a
// wire format a direction's (size - 1) x tokens symmetric rows are messages of Wire::bytes(hidden)
// instead (with a backward pass or `allow_uncompressed`: the longer of the two), and dispatch takes
// further, not symmetric, tokens messages and size x tokens decoded rows.
#pragma once

#include <cstddef>
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
  int64_t tokens = 0;        ///< max rows of any rank
  int64_t hidden = 0;        ///< features of a row
  int64_t ffn = 0;           ///< intermediate size of one whole expert
  int experts = 1;           ///< over all ranks; a multiple of size / tp
  int top_k = 1;             ///< experts per row
  int tp = 1;                ///< ranks that share each expert; divides the communicator's size
  DType dtype = DType::f32;  ///< rows and weights: f32 or bf16; on GPUs bf16 or f16
};

struct MoeOptions {
  Strategy strategy = Strategy::automatic;
  int chunks = 0;                   ///< per stage if overlapped; 0: chosen, always on GPUs
  Wire dispatch = {};               ///< wire format of rows sent to experts
  Wire combine = {};                ///< wire format of partial sums sent back
  bool allow_uncompressed = false;  ///< `automatic` also times uncompressed rows
  /// GPU ranks: forward passes save activations in their batch, at a small cost in time and the
  /// batch's memory. CPU ranks always do.
  bool backward = false;
};

/// Experts and weights of this rank's rows. The experts of one row must differ. A choice of -1 is
/// none: its weight is not read and has no gradient. A row without experts, such as padding, is not
/// sent; its result and its gradient are zeros.
struct MoeRouting {
  Tensor experts;  ///< i32 [rows, top_k]
  Tensor weights;  ///< f32 [rows, top_k]
};

/// Saved state of a forward pass for its backward pass: routing, inputs and activations of this
/// rank's experts. Its memory grows to the largest call and is then reused.
class MoeBatch {
 public:
  MoeBatch();
  ~MoeBatch();
  MoeBatch(MoeBatch&&) noexcept;
  MoeBatch& operator=(MoeBatch&&) noexcept;
  /// Number of rows that each local expert computed; empty on GPU ranks, whose host does not know
  /// it.
  std::span<const int64_t> rows_of_experts() const;
  /// Bytes of its memory for inputs and activations.
  size_t bytes() const;

 private:
  friend class MoeLayer;
  std::unique_ptr<MoeRows> rows_;
};

class MoeLayer {
 public:
  /// Collective. Throws InvalidArgument for an impossible shape, Mismatch if ranks differ in it,
  /// Unsupported for features that GPU ranks lack.
  MoeLayer(Communicator& comm, const MoeShape& shape, const MoeOptions& options = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// Allocates memory of `batch` for forward passes of this layer, which forgets the pass that has
  /// filled it. On CPU ranks it suffices for evenly spread rows and may grow in a pass. Collective:
  /// without it a forward pass allocates, and a rank without memory ends the pass. Throws IoError
  /// on CPU ranks and DeviceError on GPU ranks, on all of them, naming a rank without memory; the
  /// layer remains usable.
  void prepare(MoeBatch& batch);

  /// out[t] = sum over k of weights[t, k] x expert experts[t, k] of x[t]. x: [rows, hidden]; out:
  /// [rows, hidden], the shape's dtype or f32, rows <= tokens. w_in: [local experts x 2 x ffn
  /// shard, hidden], for each expert the gate rows, then the up-projection rows; w_out: [local
  /// experts x hidden, ffn shard].
  ///
  /// If a rank's routing has an expert id out of range, a repeated one in a row, or a weight that
  /// is not finite, every rank throws Mismatch, which names that rank. A rank with invalid operands
  /// throws InvalidArgument, the others Mismatch with the same text. Then `out` is not written,
  /// `batch` is as if never filled, and the layer remains usable. GPU ranks: as described above;
  /// without MoeOptions::backward `batch` is not filled.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeBatch& batch);

  /// Backward pass of the call that filled `batch`, which stays unchanged. dout: [rows, hidden].
  /// Writes dx [rows, hidden] (the shape's dtype or f32) and dweights f32 [rows, top_k]; adds to
  /// dw_in and dw_out, f32, of the weights' shapes. Errors as of `forward`; also InvalidArgument
  /// for a batch that no forward pass of this layer filled, and Mismatch on all ranks if batches
  /// are of different calls or a rank runs forward. Then nothing is written or added. GPU ranks: if
  /// operands or batch are invalid, InvalidArgument there, Timeout on the others; Mismatch as
  /// described above.
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeBatch& batch,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                const Tensor& dw_out);

  /// GPU ranks: number of dropped routings of this rank's rows so far. Blocks until the rank's
  /// stream is idle.
  int64_t dropped_routings() const;

  /// Strategy of dispatch and of combine in forward passes with evenly spread rows.
  Strategy dispatch_strategy() const;
  Strategy combine_strategy() const;

 private:
  std::unique_ptr<MoeOnRanks> impl_;
};

}  // namespace tandem
TANDEM_API_END
