// Stub of the choices on GPU ranks for a build without CUDA: no communicator reaches it.
#include "overlap/collectives/gpu.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

[[noreturn]] void missing() {
  throw Unsupported(
      "collectives on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

void all_reduce(Communicator&, const Tensor&, const AllowUncompressed&, const Tensor*) {
  missing();
}
void all_gather(Communicator&, const Tensor&, const Tensor&, const AllowUncompressed&) {
  missing();
}
void reduce_scatter(Communicator&, const Tensor&, const Tensor&, const AllowUncompressed&,
                    const Tensor*) {
  missing();
}

}  // namespace tandem::gpu
