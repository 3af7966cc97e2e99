// This process's rank of a World made of the caller's ncclComm_t or group. The caller's
// communicator or gather connects the ranks (comm/processes/connect_ranks.h); from then on the rank
// is like any other, with an NCCL communicator in addition to the caller's. So an abort or an error
// of one does not reach the other, and work that the caller enqueues on the first cannot come
// between calls on the second.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <exception>
#include <memory>
#include <span>
#include <string_view>

#include "comm/device/adopted_nccl.h"
#include "comm/device/gpu_coordinates.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_gather.h"
#include "comm/nccl/start.h"
#include "comm/processes/connect_ranks.h"
#include "comm/world/new_worlds.h"
#include "comm/world/world_state.h"
#include "core/cuda/current_device.h"
#include "core/cuda/driver.h"
#include "core/system/env.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

// Called before any other query of the communicator.
void check_state(ncclComm_t comm) {
  if (!comm) throw InvalidArgument("adopt_nccl: a null communicator: expected an ncclComm_t");
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
  const ncclResult_t found = asked == ncclSuccess ? state : asked;
  if (found == ncclSuccess) return;
  throw InvalidArgument(fmt::format(
      "adopt_nccl: a communicator in the state '{}': expected one that is complete and has not "
      "failed or been aborted",
      ncclGetErrorString(found)));
}

bool has_multicast(int device) {
  static const auto get =
      gpu::driver_function<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  int has = 0;
  gpu::check_driver(get(&has, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device),
                    "cuDeviceGetAttribute");
  return has != 0;
}

void look_at_stream(AdoptedNccl& adopted, cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  adopted.captured = cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
                     status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // clears the error that a default stream reports during a capture
  adopted.stream_device = adopted.current_device;
  if (!adopted.captured) {  // CUDA does not report the device of a captured stream
    gpu::check(cudaStreamGetDevice(stream, &adopted.stream_device), "cudaStreamGetDevice");
  }
  adopted.multicast = has_multicast(adopted.device);
}

AdoptedNccl look_at(ncclComm_t comm, cudaStream_t stream) {
  AdoptedNccl adopted;
  gpu::check(ncclCommCount(comm, &adopted.size), "ncclCommCount");
  gpu::check(ncclCommCuDevice(comm, &adopted.device), "ncclCommCuDevice");
  gpu::check(cudaGetDevice(&adopted.current_device), "current device");
  look_at_stream(adopted, stream);
  return adopted;
}

/// Collective. Rank of a new world whose ranks `gather` connects.
Communicators join(std::string_view what, int rank, const AdoptedNccl& adopted,
                   const control::Gather& gather, cudaStream_t stream,
                   const WorldOptions& options) {
  const processes::Newcomer local{rank, adopted.size, this_node(),
                                  refusal_of(adopted, options, gpu::users_nvls())};
  const auto met = processes::connect_ranks(what, local, gather, gpu::kMaxGpus,
                                            world_deadline(options.deadline_s));
  try {
    const auto world = WorldState::join(met.world, met.comm);
    auto made = std::make_shared<gpu::NcclCommunicator>(*met.comm, world);
    made->set_stream(stream);
    recorder().set_rank(rank);
    return {std::move(made)};
  } catch (const std::exception& error) {
    met.comm->abort(error.what());
    throw;
  }
}

}  // namespace

Communicators adopt_nccl_rank(ncclComm* comm, CUstream_st* stream, const WorldOptions& options) {
  gpu::require_gpus({});
  const double deadline_s = world_deadline(options.deadline_s);
  check_state(comm);
  const AdoptedNccl adopted = look_at(comm, stream);
  int rank = 0;
  gpu::check(ncclCommUserRank(comm, &rank), "ncclCommUserRank");
  const gpu::CurrentDevice communicators(
      adopted.device);  // another current device is an error, on all ranks
  const auto gather = [&](std::span<const std::byte> bytes) {
    return gpu::gather_by_nccl(comm, bytes, deadline_s);
  };
  return join("adopt_nccl", rank, adopted, gather, stream, options);
}

Communicators connect_gpu_rank(int rank, int size, const World::Gather& gather, CUstream_st* stream,
                               const WorldOptions& options) {
  gpu::require_gpus({});
  AdoptedNccl adopted;
  adopted.size = size;
  gpu::check(cudaGetDevice(&adopted.current_device), "current device");
  adopted.device = adopted.current_device;
  look_at_stream(adopted, stream);
  return join("connect_gpus", rank, adopted, gather, stream, options);
}

}  // namespace tandem
