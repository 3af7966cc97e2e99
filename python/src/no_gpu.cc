// Stub for GPU ranks in a build without CUDA.
#include "gpu.h"

#include <fmt/format.h>

namespace tandem::python {
namespace {

[[noreturn]] void missing(const char* what) {
  throw Unsupported(fmt::format(
      "{}: on a GPU: this build of tandem has no CUDA (-DTANDEM_CUDA=ON, make wheel CUDA=1)",
      what));
}

}  // namespace

std::unique_ptr<GpuRank> gpu_rank_of(Communicator&) {
  return nullptr;
}

bool is_captured(StreamNumber) {
  return false;
}

void encode_on_gpu(const Wire&, const Tensor&, const Tensor&, StreamNumber) {
  missing("encode");
}

void decode_on_gpu(const Wire&, const Tensor&, const Tensor&, StreamNumber) {
  missing("decode");
}

}  // namespace tandem::python
