// Stub of the optimizer on GPUs for a build without CUDA: no rank is on a GPU.
#include "engine/optim/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported("optimizer on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

void adamw(CUstream_st*, const AdamStep&, float, const AdamState&, const Tensor&, const Tensor&) {
  refuse();
}

void lamb_direction(CUstream_st*, const AdamStep&, float, const AdamState&, const Tensor&) {
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

}  // namespace tandem::gpu
