// Activation recomputation: a layer saves less of its forward pass and computes it again just
// before its backward pass. What is recomputed is in memory of the stage, which its layers and all
// microbatches in flight share, one layer of one microbatch at a time.
//
// none       saves all activations.
// selective  saves the residual stream before each branch, the outputs of the column-parallel GEMMs
//            (q, k, v, gate, up) and the routers' choices. Recomputes norms and SwiGLU, which cost
//            almost nothing, attention and the experts. Only the experts communicate again.
// full       saves the residual stream before the layer. Recomputes its forward pass except for the
//            row-parallel GEMM of the last branch, whose sum is the next layer's residual stream,
//            unless a norm of that sum reads it. Tensor-parallel gathers and sums run again, too.
//
// The same kernels run again on the same operands, so all three give the same bits. The routers'
// choices are counted once, by the first forward pass. Embedding and head save all they need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

class Branch;
struct MicrobatchState;
struct ModelContext;

enum class Recompute : uint8_t { none, selective, full };

/// "none", "selective" or "full"
Recompute parse_recompute(const std::string& name);

/// Layers of a stage that recompute.
struct RecomputedLayers {
  Recompute mode = Recompute::none;
  int64_t layers = 0;  ///< the stage's first ones; 0: all

  /// Mode of a layer, counted from the stage's first.
  Recompute of(int64_t layer) const {
    return layers == 0 || layer < layers ? mode : Recompute::none;
  }
};

/// Before the backward pass of a layer, counted from the stage's first: computes what its forward
/// pass did not save. Collective like a forward pass.
void recompute_layer(ModelContext& context, std::vector<Branch>& branches,
                     MicrobatchState& microbatch, int64_t layer);

}  // namespace tandem
