// Stubs of the GPU collectives for a build without CUDA: never reached, since no GPU communicator
// exists.
#include "collectives/gpu.h"

namespace tandem::gpu {
namespace {

[[noreturn]] void missing() {
  throw Unsupported(
      "collectives on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

void all_reduce(Communicator&, const Tensor&, ReduceOp) {
  missing();
}
void all_reduce(Communicator&, const Tensor&, const Wire&, const Tensor*) {
  missing();
}
void reduce_scatter(Communicator&, const Tensor&, const Tensor&, const Wire&, const Tensor*) {
  missing();
}
void all_gather(Communicator&, const Tensor&, const Tensor&, const Wire&) {
  missing();
}
void all_gather(Communicator&, const Tensor&, const Tensor&) {
  missing();
}
void reduce_scatter(Communicator&, const Tensor&, const Tensor&, ReduceOp) {
  missing();
}
void all_to_all(Communicator&, const Tensor&, std::span<const int64_t>, const Tensor&,
                std::span<const int64_t>) {
  missing();
}
void all_to_all(Communicator&, const Tensor&, std::span<const int64_t>, const Tensor&,
                std::span<const int64_t>, const Wire&) {
  missing();
}
void broadcast(Communicator&, const Tensor&, int) {
  missing();
}
void send(Communicator&, const Tensor&, int) {
  missing();
}
void recv(Communicator&, const Tensor&, int) {
  missing();
}

}  // namespace tandem::gpu
