// Functions of tandem/cuda.h for an existing rank.
#include <cuda_runtime_api.h>

#include <memory>

#include "comm/device/gpu_communicator.h"
#include "comm/world/host_ranks.h"
#include "core/cuda/current_device.h"
#include "tandem/cuda.h"

namespace tandem {

struct GpuGuard::Inside {
  gpu::CurrentDevice device;
  gpu::UseShare share;
  explicit Inside(const gpu::GpuCommunicator& comm) : share(comm.share_owner()) {
    gpu::check(cudaSetDevice(comm.device()), "cudaSetDevice");
  }
};

GpuGuard::GpuGuard(Communicator& comm) : inside_(std::make_unique<Inside>(gpu::as_gpu(comm))) {}

GpuGuard::~GpuGuard() = default;

Device device_of(Communicator& comm) {
  return {DeviceKind::cuda, gpu::as_gpu(comm).device()};
}

CUstream_st* stream_of(Communicator& comm) {
  return gpu::as_gpu(comm).stream();
}

void set_stream(Communicator& comm, CUstream_st* stream) {
  gpu::as_gpu(comm).set_stream(stream);
}

void synchronize(Communicator& comm) {
  gpu::as_gpu(comm).synchronize();
}

std::unique_ptr<Communicator> split_on_host(Communicator& comm) {
  return comm.on_gpu() ? gpu::as_gpu(comm).split_on_host() : comm.split(0, comm.rank());
}

void abandon_gpu_work(Communicator& comm) {
  if (comm.on_gpu()) gpu::as_gpu(comm).give_up();
}

bool has_abandoned_gpu_work(Communicator& comm) {
  return comm.on_gpu() && gpu::as_gpu(comm).has_given_up();
}

}  // namespace tandem
