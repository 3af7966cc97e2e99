// A Transformer's kernels on the calling thread's CPU threads; semantics in kernels/*.h.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention/paged_attention.h"
#include "kernels/dct.h"
#include "kernels/router.h"

namespace tandem::cpu {

void rms_norm_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& out,
                      const Tensor& inverse_rms);
void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out);
void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                       const Tensor& dout, const Tensor& dx, const Tensor& dweight,
                       const Tensor& dx_bf16);
void add_bias(const Tensor& bias, const Tensor& rows);
void column_sums(const Tensor& rows, const Tensor& sums, bool accumulate);
void rms_norm_heads(const Tensor& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized);
void rms_norm_heads_backward(const Tensor& unnormalized, const Tensor& weight, double eps,
                             const Tensor& drows, const Tensor& dweight);
void gate_rows(const Tensor& gate, const Tensor& rows);
void gate_rows_backward(const Tensor& gate, const Tensor& gated, const Tensor& drows,
                        const Tensor& dgate);
void scale_rows(const Tensor& rows, double factor);
void permute_heads(const Tensor& rows, std::span<const int32_t> order);
void add_sinks(const Tensor& sinks, const Tensor& out, const Tensor& log_sums);
void sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& log_sums,
                    const Tensor& dout, const Tensor& dsinks, bool accumulate);
void swiglu_forward(const Tensor& gate, const Tensor& up, const Tensor& out);
void swiglu_backward(const Tensor& gate, const Tensor& up, const Tensor& dout, const Tensor& dgate,
                     const Tensor& dup);
void add(const Tensor& x, const Tensor& y, const Tensor& out);
void sum(std::span<const Tensor> terms, const Tensor& out);
void cast(const Tensor& from, const Tensor& to);
void dct_forward(const DctTiles& tiles, float scale, const Tensor& x, const Tensor& coefficients);
void dct_inverse(const DctTiles& tiles, const Tensor& coefficients, const Tensor& x);
void to_tiles(const DctTiles& tiles, const Tensor& x, const Tensor& packed);
void from_tiles(const DctTiles& tiles, const Tensor& packed, const Tensor& x);
void embedding_forward(const Tensor& tokens, const Tensor& table, int64_t begin, const Tensor& out);
void embedding_backward(const Tensor& tokens, const Tensor& dout, int64_t begin,
                        const Tensor& dtable);
void cross_entropy_max(const Tensor& logits, const Tensor& maxima);
void cross_entropy_sum(const Tensor& logits, const Tensor& targets, int64_t begin,
                       const Tensor& maxima, const Tensor& sums, const Tensor& picked);
void cross_entropy_loss(const Tensor& targets, const Tensor& sums, const Tensor& picked,
                        const Tensor& total);
void cross_entropy_backward(const Tensor& logits, const Tensor& targets, int64_t begin,
                            const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits);
void route_forward(const Tensor& logits, const Tensor& bias, const RouterOptions& options,
                   const Tensor& scores, const Tensor& experts, const Tensor& weights,
                   const Tensor& tokens);
void route_backward(const Tensor& scores, const Tensor& experts, const Tensor& dweights,
                    const Tensor& balance, const RouterOptions& options, const Tensor& dlogits);
void add_router_load(const Tensor& scores, const Tensor& chosen, const Tensor& load);
void add_loads(const Tensor& from, const Tensor& to);
void balance_gradient(const AuxLoss& loss, const Tensor& load, const Tensor& balance);
void add_aux_losses(const AuxLoss& loss, const Tensor& loads, const Tensor& total);
void adjust_router_bias(const Tensor& load, float rate, const Tensor& bias);
/// f32 elements of scratch that paged_attention needs with the calling thread's kernel threads;
/// with less it runs on fewer.
int64_t paged_attention_scratch(const PagedShape& shape);
void paged_attention(const PagedShape& shape, const RopeTable& rope, int64_t window,
                     const PagedRows& rows, const PagedTensors& tensors);

}  // namespace tandem::cpu
