#include "comm/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/nccl/ipc_memory.h"
#include "comm/nccl/nccl_buffer.h"
#include "core/cuda/current_device.h"
#include "core/cuda/modules.h"

namespace tandem::gpu {
namespace {

/// Limit for NCCL to connect the ranks, in deadlines and, as it takes a while, in seconds.
constexpr double kConnectDeadlines = 3, kMinConnect_s = 30;
/// For a rank's loss to become known after NCCL has noticed that a connection is closed.
constexpr std::chrono::milliseconds kNotice{500};

std::vector<std::string> texts_of_ranks(Communicator& control, const std::string& local_data,
                                        std::string_view what) {
  std::vector<std::string> texts;
  for (const auto& blob :
       control.exchange(std::as_bytes(std::span(local_data.data(), local_data.size())), what)) {
    texts.emplace_back(reinterpret_cast<const char*>(blob.data()), blob.size());
  }
  return texts;
}

// UUID of the GPU, or its PCI bus address if the driver reports none.
std::string gpu_identity(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "device properties");
  std::string id;
  for (const char byte : properties.uuid.bytes) id += fmt::format("{:02x}", uint8_t(byte));
  if (id.find_first_not_of('0') != std::string::npos) return id;
  return fmt::format("{} {:x}:{:x}:{:x}", this_node(), properties.pciDomainID, properties.pciBusID,
                     properties.pciDeviceID);
}

std::vector<std::string> visible_gpus() {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count GPUs");
  std::vector<std::string> all;
  for (int device = 0; device < devices; ++device) all.push_back(gpu_identity(device));
  return all;
}

GpuPath path_between(int device, int other) {
  int reaches = 0, atomics = 0;
  check(cudaDeviceCanAccessPeer(&reaches, device, other), "peer access");
  check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other),
        "peer attributes");
  return {reaches != 0, atomics != 0};
}

std::vector<GpuCoordinates> coordinates_of_ranks(Communicator& control, int device) {
  const std::vector<std::string> nodes = texts_of_ranks(control, this_node(), "node"),
                                 gpus = texts_of_ranks(control, gpu_identity(device), "GPU");
  std::vector<GpuCoordinates> coordinates;
  for (size_t rank = 0; rank < nodes.size(); ++rank)
    coordinates.push_back({nodes[rank], gpus[rank]});
  return coordinates;
}

void check_distinct_gpus(const std::vector<GpuCoordinates>& of_ranks) {
  const std::optional<SharedGpu> shared = shared_gpu(of_ranks);
  if (!shared) return;
  throw InvalidArgument(fmt::format("nccl: ranks {} and {} have the same GPU {}: expected one each",
                                    shared->first, shared->second,
                                    of_ranks[size_t(shared->first)].gpu));
}

void check_one_gpu(const std::vector<GpuCoordinates>& of_ranks) {
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank].gpu == of_ranks[0].gpu) continue;
    throw InvalidArgument(
        fmt::format("nccl: ranks 0 and {} have the GPUs {} and {}: expected one GPU for all", rank,
                    of_ranks[0].gpu, of_ranks[rank].gpu));
  }
}

}  // namespace

void check(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  throw DeviceError(
      fmt::format("{}: {} ({})", what, ncclGetErrorString(code), ncclGetLastError(nullptr)));
}

void check(const GpuCommunicator& comm, ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  const std::string error = ncclGetLastError(nullptr);
  const auto until = std::chrono::steady_clock::now() + kNotice;
  while (std::chrono::steady_clock::now() < until) {
    comm.look_for_abort();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw DeviceError(fmt::format("{}: {} ({})", what, ncclGetErrorString(code), error));
}

ncclComm_t nccl_of(const GpuCommunicator& comm) {
  const auto* nccl = dynamic_cast<const NcclCommunicator*>(&comm);
  return nccl ? nccl->nccl() : nullptr;
}

NcclCommunicator::NcclCommunicator(Communicator& control, std::shared_ptr<WorldState> world,
                                   bool shares_process_gpu, bool is_split)
    : GpuCommunicator(control, std::move(world)), shares_process_gpu_(shares_process_gpu) {
  ncclUniqueId id{};
  if (rank_ == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const auto ids =
      control_.exchange(std::as_bytes(std::span(&id, rank_ == 0 ? 1u : 0u)), "nccl id");
  if (ids[0].size() != sizeof id) throw DeviceError("nccl id: rank 0 sent none");
  std::memcpy(&id, ids[0].data(), sizeof id);
  const std::vector<GpuCoordinates> coordinates = coordinates_of_ranks(control_, device());
  shares_process_gpu_ ? check_one_gpu(coordinates) : check_distinct_gpus(coordinates);
  load_modules();
  connect(id);
  try {
    agree_on_paths(coordinates);
    if (!is_split && size_ > 1) watch_.emplace(control_, [this] { give_up_for_abort(); });
  } catch (...) {
    give_up();
    throw;
  }
}

// NCCL waits without a deadline for missing ranks, so it has a thread of its own, which is
// abandoned if one is lost.
void NcclCommunicator::connect(const ncclUniqueId& id) {
  struct Connection {
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclInternalError;
  };
  const auto made = std::make_shared<Connection>();
  std::promise<void> promise;
  const std::future<void> ended = promise.get_future();
  std::thread([made, id, rank = rank_, size = size_, gpu = device(),
               promise = std::move(promise)]() mutable {
    cudaSetDevice(gpu);
    made->result = ncclCommInitRank(&made->comm, size, id, rank);
    promise.set_value();
  }).detach();
  const auto begin = std::chrono::steady_clock::now();
  const double limit_s = std::max(kConnectDeadlines * deadline_s_, kMinConnect_s);
  const WaitActivity waits("ncclCommInitRank", -1);
  while (ended.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    look_for_abort();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (waited.count() > limit_s) throw Timeout({"ncclCommInitRank"}, rank_, 0, 0, limit_s);
  }
  check(*this, made->result, "ncclCommInitRank");
  nccl_ = made->comm;
}

// Collective.
void NcclCommunicator::agree_on_paths(std::span<const GpuCoordinates> coordinates) {
  GpuPath path = path_to_all(coordinates, rank_, visible_gpus(),
                             [&](int other) { return path_between(device(), other); });
  // Pointers are read from NCCL's team of ranks that reach each other, which must equal this world.
  path.reaches =
      path.reaches && size_ <= kMaxGpus && (shares_process_gpu_ || lsa_team_size(nccl_) == size_);
  for (const auto& blob : control_.exchange(std::as_bytes(std::span(&path, 1)), "paths")) {
    GpuPath remote;
    std::memcpy(&remote, blob.data(), sizeof remote);
    one_node_ = one_node_ && remote.reaches;
    peer_atomics_ = peer_atomics_ && remote.atomics;
  }
}

NcclCommunicator::~NcclCommunicator() {
  const CurrentDevice here(device());
  end();
  watch_.reset();
  const ncclComm_t nccl = nccl_;
  if (!nccl) return;
  if (!world_state()) {
    ncclCommDestroy(nccl);
    return;
  }
  // ncclCommDestroy waits for this node's peers in other processes and has no deadline.
  world_state()->end_with_all([nccl](bool together) {
    const CurrentDevice unchanged;
    if (together) {
      ncclCommDestroy(nccl);
    } else {
      ncclCommAbort(nccl);
    }
  });
}

// NCCL's kernels have no deadline: the next call that frees device memory would wait for them.
void NcclCommunicator::do_give_up() const {
  const ncclComm_t nccl = nccl_.exchange(nullptr);
  if (!nccl) return;
  // NCCL first ends its kernels; then it waits until no CUDA graph has a call of the communicator,
  // and the caller may have to destroy some.
  std::promise<void> promise;
  aborted_ = promise.get_future();
  try {
    std::thread([nccl, gpu = device(), promise = std::move(promise)]() mutable {
      cudaSetDevice(gpu);
      ncclCommAbort(nccl);
      promise.set_value();
    }).detach();
  } catch (const std::system_error&) {  // no thread: the communicator is left as it is
    aborted_ = {};
  }
}

void NcclCommunicator::await_give_up(std::chrono::steady_clock::time_point until) const {
  if (aborted_.valid()) std::exchange(aborted_, {}).wait_until(until);
}

// Peers that still write to it have their own mappings, which keep it alive.
void NcclCommunicator::abandon(std::vector<OwnedSymmetric> left) {
  cudaDeviceSynchronize();
  left.clear();
}

std::shared_ptr<GpuBuffer> NcclCommunicator::do_allocate(size_t bytes, int signals) {
  const size_t signals_at = (bytes + 127) / 128 * 128;
  const size_t total = signals_at + size_t(signals) * sizeof(uint64_t);
  std::vector<RankMemory> memories{size_t(size_)};
  OwnedSymmetric memory =
      shares_process_gpu_ ? obtain_shared(total, memories) : obtain_window(total, memories);
  for (RankMemory& rank_memory : memories) {
    if (rank_memory.memory)
      rank_memory.signals = reinterpret_cast<uint64_t*>(rank_memory.memory + signals_at);
  }
  return std::make_shared<GpuBuffer>(*this, bytes, signals, std::move(memory), std::move(memories));
}

OwnedSymmetric NcclCommunicator::obtain_window(size_t bytes, std::vector<RankMemory>& memories) {
  auto memory = std::make_unique<NcclMemory>(&nccl_);
  const size_t total = NcclMemory::pages(bytes);
  agree_on("allocate", [&] { memory->obtain(total, registering_.get()); });
  // After this step no rank signals into memory that is still being cleared.
  agree_on("allocate, peers", [&] {
    if (size_ == 1 || !one_node_) return;
    memory->map(total, *addresses_.get(), size_, registering_.get());
    for (int r = 0; r < size_; ++r) memories[size_t(r)].memory = addresses_.get()->of[r];
  });
  memories[size_t(rank_)].memory = memory->local();
  return memory;
}

OwnedSymmetric NcclCommunicator::obtain_shared(size_t bytes, std::vector<RankMemory>& memories) {
  auto memory = std::make_unique<IpcMemory>();
  cudaIpcMemHandle_t local{};
  agree_on("allocate", [&] {
    memory->obtain(bytes);
    local = memory->handle();
  });
  std::vector<cudaIpcMemHandle_t> handles;
  for (const auto& blob : exchange(std::as_bytes(std::span(&local, 1)), "memory handles")) {
    std::memcpy(&handles.emplace_back(), blob.data(), sizeof local);
  }
  agree_on("allocate, peers", [&] { memory->map(handles, rank_); });
  for (int rank = 0; rank < size_; ++rank) memories[size_t(rank)].memory = memory->of(rank);
  return memory;
}

std::unique_ptr<GpuCommunicator> NcclCommunicator::do_split(Communicator& control) {
  return std::make_unique<NcclCommunicator>(control, world_state(), shares_process_gpu_, true);
}

std::string NcclCommunicator::link() const {
  if (size_ == 1) return "local";
  if (shares_process_gpu_) return "same-gpu";
  if (!one_node_) return "network";
  return peer_atomics_ ? "nvlink" : "pcie";
}

}  // namespace tandem::gpu
