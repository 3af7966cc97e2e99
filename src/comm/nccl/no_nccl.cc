// Stub of the nccl transport for a build without CUDA.
#include "comm/world/gpus.h"
#include "comm/world/host_ranks.h"
#include "comm/world/new_worlds.h"
#include "tandem/cuda.h"

namespace tandem {
namespace {

constexpr const char* kMissing = "this build has no CUDA (configure with -DTANDEM_CUDA=ON)";

[[noreturn]] void refuse(const Communicator& comm) {
  throw InvalidArgument("communicator: transport " + std::string(comm.transport()) +
                        ": expected nccl");
}

}  // namespace

int gpu_count() {
  return 0;
}

Gpus this_machines_gpus() {
  Gpus gpus;
  gpus.missing = kMissing;
  return gpus;
}

bool has_lost_gpu() {
  return false;
}

void run_gpus(const WorldOptions&, const std::function<void(Communicator&)>&) {
  throw Unsupported(std::string("nccl transport: ") + kMissing);
}

Communicators new_gpu_ranks(const WorldOptions&) {
  throw Unsupported(std::string("nccl transport: ") + kMissing);
}

Communicators adopt_nccl_rank(ncclComm*, CUstream_st*, const WorldOptions&) {
  throw Unsupported(std::string("adopt_nccl: ") + kMissing);
}

Communicators connect_gpu_rank(int, int, const World::Gather&, CUstream_st*, const WorldOptions&) {
  throw Unsupported(std::string("connect_gpus: ") + kMissing);
}

struct GpuGuard::Inside {};

GpuGuard::GpuGuard(Communicator& comm) {
  refuse(comm);
}

GpuGuard::~GpuGuard() = default;

Device device_of(Communicator& comm) {
  refuse(comm);
}

CUstream_st* stream_of(Communicator& comm) {
  refuse(comm);
}

void set_stream(Communicator& comm, CUstream_st*) {
  refuse(comm);
}

void synchronize(Communicator& comm) {
  refuse(comm);
}

std::unique_ptr<Communicator> split_on_host(Communicator& comm) {
  return comm.split(0, comm.rank());
}

void abandon_gpu_work(Communicator&) {}

bool has_abandoned_gpu_work(Communicator&) {
  return false;
}

}  // namespace tandem
