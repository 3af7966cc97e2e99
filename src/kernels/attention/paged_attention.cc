#include "kernels/attention/paged_attention.h"

#include <fmt/format.h>

#include <bit>

#include "kernels/attention/simple_attention.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {
namespace {

const PagedShape& checked(const PagedShape& shape) {
  const int blocks = shape.cluster;
  const bool is_size = blocks > 0 && blocks <= kMaxCluster && std::has_single_bit(unsigned(blocks));
  if (!is_size && blocks != 0 && blocks != kNoCluster) {
    throw InvalidArgument(fmt::format(
        "paged_attention: clusters of {} blocks: expected a power of two up to {}, {} or 0", blocks,
        kMaxCluster, kNoCluster));
  }
  return shape;
}

}  // namespace

bool has_chunk_kernels(const Exec& exec, DType dtype, int64_t head_dim) {
  const bool has_kernels = dtype == DType::bf16 && head_dim <= kMaxChunkHead;
  if (exec.on_gpu() && !has_kernels) {
    note_simple_attention(
        fmt::format("prompts in {} with head_dim {}: expected bf16 and at most {}", name_of(dtype),
                    head_dim, kMaxChunkHead));
  }
  return has_kernels;
}

PagedAttention::PagedAttention(const Exec& exec, const PagedShape& shape, const RopeTable& rope,
                               int64_t window)
    : shape_(checked(shape)),
      rope_(rope),
      window_(window),
      elements_(exec.on_gpu() ? gpu::paged_attention_partials(shape)
                              : cpu::paged_attention_scratch(shape)),
      scratch_(size_t(elements_) * sizeof(float), exec.device) {
  if (exec.on_gpu() && shape.softcap > 0) {
    throw Unsupported("paged attention with a soft cap: expected CPU ranks");
  }
}

void PagedAttention::run(const Exec& exec, const PagedRows& rows, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& keys, const Tensor& values,
                         const Tensor& out, const Tensor& sinks) {
  const PagedTensors tensors{q,      k,   v,     keys,
                             values, out, sinks, scratch_.view(DType::f32, {elements_})};
  if (exec.on_gpu()) {
    if (sinks.dims() > 0) throw Unsupported("paged attention with sinks: expected CPU ranks");
    return gpu::paged_attention(exec.stream, shape_, rope_, window_, rows, tensors);
  }
  cpu::paged_attention(shape_, rope_, window_, rows, tensors);
}

}  // namespace tandem
