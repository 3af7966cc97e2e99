#include "kernels/cuda/fused_attention.h"

#include <fmt/format.h>

#include "core/exec.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

}  // namespace

void FusedAttention::check_stream(const Exec& exec) const {
  if (exec.stream == stream_) return;
  throw InvalidArgument("attention: expected the stream that it was made for");
}

void FusedAttention::check_rows(const char* name, const Tensor& tensor, int64_t stride) const {
  if (tensor.dtype() == rows_.dtype && tensor.stride(0) == stride && is_aligned(tensor)) return;
  throw InvalidArgument(
      fmt::format("attention: {} {}, a row every {} elements: expected {}, a row every {}, "
                  "aligned to 16 bytes",
                  name, tensor.describe(), tensor.stride(0), name_of(rows_.dtype), stride));
}

void FusedAttention::check_log_sums(const Tensor& tensor) const {
  if (tensor.dtype() == DType::f32 && tensor.contiguous() && is_aligned(tensor)) return;
  throw InvalidArgument("attention: log_sums " + tensor.describe() +
                        ": expected f32 without gaps, aligned to 16 bytes");
}

void FusedAttention::check_rotated(const Tensor& q, const Tensor& k) {
  if (!q.read_only() && !k.read_only()) return;
  throw InvalidArgument("attention: q and k are rotated in place: expected writable tensors");
}

}  // namespace tandem::gpu
