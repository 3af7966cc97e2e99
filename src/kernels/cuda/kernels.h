// A Transformer's kernels on a stream of a GPU; semantics in kernels/*.h. Sums have a fixed order,
// so runs give equal bits. Throw InvalidArgument for dtypes other than f32 and bf16.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention/attention.h"
#include "kernels/attention/paged_attention.h"
#include "kernels/dct.h"
#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

void rms_norm_forward(CUstream_st* stream, const Tensor& x, const Tensor& weight, double eps,
                      const Tensor& out, const Tensor& inverse_rms);
void add_rms_norm_forward(CUstream_st* stream, const Tensor& x, const Tensor& branch,
                          const Tensor& weight, double eps, const Tensor& y, const Tensor& out,
                          const Tensor& inverse_rms);
void rms_norm(CUstream_st* stream, const Tensor& x, const Tensor& weight, double eps,
              const Tensor& out);
int64_t rms_norm_partial_sums(int64_t rows, int64_t hidden);
void rms_norm_backward(CUstream_st* stream, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight, const Tensor& partial_sums, const Tensor& dx_bf16);
void swiglu_forward(CUstream_st* stream, const Tensor& gate, const Tensor& up, const Tensor& out);
void swiglu_backward(CUstream_st* stream, const Tensor& gate, const Tensor& up, const Tensor& dout,
                     const Tensor& dgate, const Tensor& dup);
void add(CUstream_st* stream, const Tensor& x, const Tensor& y, const Tensor& out);
void sum(CUstream_st* stream, std::span<const Tensor> terms, const Tensor& out);
void cast(CUstream_st* stream, const Tensor& from, const Tensor& to);
void dct_forward(CUstream_st* stream, const DctTiles& tiles, float scale, const Tensor& x,
                 const Tensor& coefficients);
void dct_inverse(CUstream_st* stream, const DctTiles& tiles, const Tensor& coefficients,
                 const Tensor& x);
void to_tiles(CUstream_st* stream, const DctTiles& tiles, const Tensor& x, const Tensor& packed);
void from_tiles(CUstream_st* stream, const DctTiles& tiles, const Tensor& packed, const Tensor& x);
void embedding_forward(CUstream_st* stream, const Tensor& tokens, const Tensor& table,
                       int64_t begin, const Tensor& out);
void embedding_backward(CUstream_st* stream, const Tensor& tokens, const Tensor& dout,
                        int64_t begin, const Tensor& dtable, const Tensor& order);
void cross_entropy_max(CUstream_st* stream, const Tensor& logits, const Tensor& maxima);
void cross_entropy_sum(CUstream_st* stream, const Tensor& logits, const Tensor& targets,
                       int64_t begin, const Tensor& maxima, const Tensor& sums,
                       const Tensor& picked);
void cross_entropy_max_and_sum(CUstream_st* stream, const Tensor& logits, const Tensor& targets,
                               const Tensor& maxima, const Tensor& sums, const Tensor& picked);
void cross_entropy_loss(CUstream_st* stream, const Tensor& targets, const Tensor& sums,
                        const Tensor& picked, const Tensor& total);
void cross_entropy_backward(CUstream_st* stream, const Tensor& logits, const Tensor& targets,
                            int64_t begin, const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits);

/// Throws Unsupported for a head size that the kernels do not have.
void check_attention(const AttentionShape& shape);
/// Window that changes the results: 0 for one that covers a whole sequence.
constexpr int64_t effective_window(const AttentionShape& shape, int64_t window) {
  return window > 0 && window < shape.seq ? window : 0;
}
void attention_forward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                       const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       const Tensor& log_sums, const AttentionMask& mask);
struct AttentionGradients {
  const Tensor &q, &k, &v, &out, &log_sums, &dout, &dq, &dk, &dv;
};
void attention_backward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                        const AttentionGradients& tensors, const AttentionMask& mask);

/// f32 elements of scratch that paged_attention needs. Throws Unsupported for a head size that the
/// kernels do not have.
int64_t paged_attention_partials(const PagedShape& shape);
void paged_attention(CUstream_st* stream, const PagedShape& shape, const RopeTable& rope,
                     int64_t window, const PagedRows& rows, const PagedTensors& tensors);

void add_bias(CUstream_st* stream, const Tensor& bias, const Tensor& rows);
void column_sums(CUstream_st* stream, const Tensor& rows, const Tensor& sums, bool accumulate);
void gate_rows(CUstream_st* stream, const Tensor& gate, const Tensor& rows);
void gate_rows_backward(CUstream_st* stream, const Tensor& gate, const Tensor& gated,
                        const Tensor& drows, const Tensor& dgate);
void rms_norm_heads(CUstream_st* stream, const Tensor& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized);
void rms_norm_heads_backward(CUstream_st* stream, const Tensor& unnormalized, const Tensor& weight,
                             double eps, const Tensor& drows, const Tensor& dweight,
                             const Tensor& partial_sums);

int64_t sample_scratch(int64_t vocab);
void sample_rows(CUstream_st* stream, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled);
void feed_tokens(CUstream_st* stream, const Tensor& sampled, const Tensor& tokens);

}  // namespace tandem::gpu
