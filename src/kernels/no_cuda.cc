// Stub of the kernels on GPUs for a build without CUDA: no rank is on a GPU.
#include "kernels/cuda/cudnn/attention.h"
#include "kernels/cuda/hopper_attention.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/optimizer/outer_step.h"
#include "kernels/cuda/router.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported("kernels on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

void rms_norm_forward(CUstream_st*, const Tensor&, const Tensor&, double, const Tensor&,
                      const Tensor&) {
  refuse();
}

void add_rms_norm_forward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, double,
                          const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void rms_norm(CUstream_st*, const Tensor&, const Tensor&, double, const Tensor&) {
  refuse();
}

int64_t rms_norm_partial_sums(int64_t, int64_t) {
  refuse();
}

void rms_norm_backward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void swiglu_forward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void swiglu_backward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                     const Tensor&) {
  refuse();
}

void add(CUstream_st*, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void sum(CUstream_st*, std::span<const Tensor>, const Tensor&) {
  refuse();
}

void cast(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

void embedding_forward(CUstream_st*, const Tensor&, const Tensor&, int64_t, const Tensor&) {
  refuse();
}

void embedding_backward(CUstream_st*, const Tensor&, const Tensor&, int64_t, const Tensor&,
                        const Tensor&) {
  refuse();
}

void cross_entropy_max(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

void cross_entropy_sum(CUstream_st*, const Tensor&, const Tensor&, int64_t, const Tensor&,
                       const Tensor&, const Tensor&) {
  refuse();
}

void cross_entropy_max_and_sum(CUstream_st*, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&) {
  refuse();
}

void cross_entropy_loss(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void cross_entropy_backward(CUstream_st*, const Tensor&, const Tensor&, int64_t, const Tensor&,
                            const Tensor&, float, const Tensor&) {
  refuse();
}

void route_forward(CUstream_st*, const Tensor&, const Tensor&, const RouterOptions&, const Tensor&,
                   const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void route_backward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const RouterOptions&, const Tensor&) {
  refuse();
}

void add_router_load(CUstream_st*, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void add_loads(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

void balance_gradient(CUstream_st*, const AuxLoss&, const Tensor&, const Tensor&) {
  refuse();
}

void add_aux_losses(CUstream_st*, const AuxLoss&, const Tensor&, const Tensor&) {
  refuse();
}

void adjust_router_bias(CUstream_st*, const Tensor&, float, const Tensor&) {
  refuse();
}

void check_attention(const AttentionShape&) {
  refuse();
}

void attention_forward(CUstream_st*, const AttentionShape&, const RopeTable&, const Tensor&,
                       const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const AttentionMask&) {
  refuse();
}

void attention_backward(CUstream_st*, const AttentionShape&, const RopeTable&,
                        const AttentionGradients&, const AttentionMask&) {
  refuse();
}

int64_t paged_attention_partials(const PagedShape&) {
  refuse();
}

void paged_attention(CUstream_st*, const PagedShape&, const RopeTable&, int64_t, const PagedRows&,
                     const PagedTensors&) {
  refuse();
}

void add_bias(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

void column_sums(CUstream_st*, const Tensor&, const Tensor&, bool) {
  refuse();
}

void gate_rows(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

void gate_rows_backward(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void rms_norm_heads(CUstream_st*, const Tensor&, double, const Tensor&, const Tensor&) {
  refuse();
}

void rms_norm_heads_backward(CUstream_st*, const Tensor&, const Tensor&, double, const Tensor&,
                             const Tensor&, const Tensor&) {
  refuse();
}

int64_t sample_scratch(int64_t) {
  refuse();
}

void sample_rows(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void feed_tokens(CUstream_st*, const Tensor&, const Tensor&) {
  refuse();
}

std::unique_ptr<FusedAttention> make_cudnn_attention(const Exec&, const AttentionShape&,
                                                     const RopeTable&, const AttentionRows&,
                                                     int64_t) {
  refuse();
}

std::string why_not_hopper_attention(const AttentionShape&, const AttentionRows&) {
  refuse();
}

std::unique_ptr<FusedAttention> make_hopper_attention(const Exec&, const AttentionShape&,
                                                      const RopeTable&, const AttentionRows&) {
  refuse();
}

std::string describe_cudnn() {
  return "absent: this build has no CUDA";
}

void dct_forward(CUstream_st*, const DctTiles&, float, const Tensor&, const Tensor&) {
  refuse();
}

void dct_inverse(CUstream_st*, const DctTiles&, const Tensor&, const Tensor&) {
  refuse();
}

void to_tiles(CUstream_st*, const DctTiles&, const Tensor&, const Tensor&) {
  refuse();
}

void from_tiles(CUstream_st*, const DctTiles&, const Tensor&, const Tensor&) {
  refuse();
}

void adamw(CUstream_st*, const AdamConstants&, float, const AdamState&, const Tensor&,
           const Tensor&) {
  refuse();
}

void lamb_direction(CUstream_st*, const AdamConstants&, float, const AdamState&, const Tensor&) {
  refuse();
}

void lamb_update(CUstream_st*, float, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

size_t square_sum_bytes(int) {
  refuse();
}

void add_squares(CUstream_st*, const Tensor&, const Memory&, int) {
  refuse();
}

void subtract(CUstream_st*, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}

void divide(CUstream_st*, const Tensor&, float) {
  refuse();
}

void scale(CUstream_st*, const Tensor&, float, const Tensor&) {
  refuse();
}

void outer_step(CUstream_st*, const OuterConstants&, const Tensor&, const OuterState&) {
  refuse();
}

void take_signs(CUstream_st*, const Tensor&) {
  refuse();
}

void step_along(CUstream_st*, const Tensor&, float, const Tensor&) {
  refuse();
}

}  // namespace tandem::gpu
