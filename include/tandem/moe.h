// Mixture-of-Experts layer whose communication overlaps its GEMMs (COMET, arXiv 2502.19811). Rows
// are dispatched to the ranks that hold their experts (SwiGLU MLPs) and combined as weighted sums.
// The caller (a router) chooses the experts of a row. No row is dropped or padded: an expert, a
// rank or a call without rows is valid.
//
// The communicator's ranks are ep x tp, with ep = size / tp: rank r has shard shard_of(ffn, tp, r %
// tp) of each expert in shard_of(experts, ep, r / tp). Every rank passes its own rows (their number
// may differ by rank and by call) and gets their results. Construction is collective and chooses
// the strategy; sums have one order in f32, bitwise equal on every run and in every strategy. GPU
// ranks (one node, sm_90) enqueue passes, and the host does not wait. Limits, invalid routing, wire
// formats and memory: docs/reference/operators.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {
class MoeRows;           // internal
class MoeOnRanks;        // internal
struct MoeActivation;    // internal
struct MoeQuantization;  // internal
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

/// Rows that a forward pass saves for the gradients of the first weight. The bits are the same.
enum class MoeSave : uint8_t {
  sorted,  ///< each once for every local expert that it has, and the activations before and after
           ///< the gate
  rows,    ///< each once; the backward pass sorts them again, and applies the gate again
  /// This rank's only: the backward pass dispatches them again, and repeats the first GEMM.
  recompute,
};
std::string_view name_of(MoeSave save);
/// Throws InvalidArgument for another name.
MoeSave parse_moe_save(std::string_view name);

/// A backward pass adds gradients of the weights to what is there, or stores them.
enum class WeightGradients : uint8_t { add, store };

struct MoeOptions {
  Strategy strategy = Strategy::automatic;
  int chunks = 0;                   ///< per stage if overlapped; 0: chosen, always on GPUs
  Wire dispatch = {};               ///< wire format of rows sent to experts
  Wire combine = {};                ///< wire format of partial sums sent back
  bool allow_uncompressed = false;  ///< `automatic` also times uncompressed rows
  /// GPU ranks: forward passes save activations in their batch, at a small cost in time and the
  /// batch's memory. CPU ranks always do.
  bool backward = false;
  MoeSave save = MoeSave::sorted;  ///< on GPUs sorted
  /// CPU ranks: GEMMs multiply e4m3 rows, which are sent as such. For the engine.
  const MoeQuantization* quantization = nullptr;
  /// CPU ranks: another activation than SwiGLU, or biases before it; nullptr: none. For the engine.
  const MoeActivation* activation = nullptr;
  /// As of OverlapOptions, for each pass: one of whose halves, dispatch and combine, neither
  /// overlaps is refused. The backward pass is checked at construction if `backward` is set,
  /// otherwise, on CPU ranks, by its first call.
  bool strict = false;
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
  /// Bytes of its memory for rows and activations.
  size_t bytes() const;

 private:
  friend class MoeLayer;
  std::unique_ptr<MoeRows> rows_;
};

class MoeLayer {
 public:
  /// Collective. Throws InvalidArgument for an impossible shape, Mismatch if ranks differ in it,
  /// Unsupported for features that GPU ranks lack, and for what `strict` forbids.
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
  ///
  /// `meanwhile` is called once: on CPU ranks as soon as this rank's rows are being sent, on GPU
  /// ranks first. It must not use this layer's communicator or operands that are written here.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeBatch& batch, const std::function<void()>& meanwhile = {});

  /// Backward pass of the call that filled `batch`, which stays unchanged. dout: [rows, hidden].
  /// Writes dx [rows, hidden] (the shape's dtype or f32) and dweights f32 [rows, top_k]; adds to
  /// dw_in and dw_out, of the weights' shapes, or stores them: then an expert without rows has
  /// zeros, and what was there is not read. f32, or the shape's dtype, rounded once (on GPU ranks
  /// only if stored, both or none).
  /// Errors as of `forward`; also InvalidArgument for a batch that no forward pass of this layer
  /// filled, and Mismatch on all ranks if batches are of different calls or a rank runs forward.
  /// Then nothing is written or added. GPU ranks: if operands or batch are invalid,
  /// InvalidArgument there, Timeout on the others; Mismatch as described above.
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeBatch& batch,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in, const Tensor& dw_out,
                WeightGradients gradients = WeightGradients::add,
                const std::function<void()>& meanwhile = {});

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
