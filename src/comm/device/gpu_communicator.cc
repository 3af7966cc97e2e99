#include "comm/device/gpu_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "comm/arguments.h"
#include "comm/error_record.h"
#include "comm/gpu_place.h"
#include "comm/nccl/lsa_pointers.h"
#include "comm/device/stream_memory.h"
#include "core/cuda/modules.h"

namespace tandem::gpu {

using Clock = std::chrono::steady_clock;

namespace {

// In deadlines: a call's device-side waits end within two and a quarter (patient()).
constexpr double kPatience = 3;
constexpr std::chrono::milliseconds kGrace{100};

std::vector<std::string> texts_of_ranks(Communicator& control, const std::string& mine,
                                        std::string_view what) {
  std::vector<std::string> texts;
  for (const auto& blob :
       control.exchange(std::as_bytes(std::span(mine.data(), mine.size())), what)) {
    texts.emplace_back(reinterpret_cast<const char*>(blob.data()), blob.size());
  }
  return texts;
}

// Its UUID, or where the driver does not say it its place on the bus.
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

std::vector<GpuPlace> places_of_ranks(Communicator& control, int device) {
  const std::vector<std::string> nodes = texts_of_ranks(control, this_node(), "node"),
                                 gpus = texts_of_ranks(control, gpu_identity(device), "GPU");
  std::vector<GpuPlace> places;
  for (size_t rank = 0; rank < nodes.size(); ++rank) places.push_back({nodes[rank], gpus[rank]});
  return places;
}

void check_own_gpus(const std::vector<GpuPlace>& of_ranks) {
  const std::optional<SharedGpu> shared = shared_gpu(of_ranks);
  if (!shared) return;
  throw InvalidArgument(fmt::format("nccl: ranks {} and {} have the same GPU {}: expected one each",
                                    shared->first, shared->second,
                                    of_ranks[size_t(shared->first)].gpu));
}

}  // namespace

void check(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  throw DeviceError(
      fmt::format("{}: {} ({})", what, ncclGetErrorString(code), ncclGetLastError(nullptr)));
}

GpuCommunicator& as_gpu(Communicator& comm) {
  auto* nccl = dynamic_cast<GpuCommunicator*>(&comm);
  if (!nccl) {
    throw InvalidArgument(
        fmt::format("communicator: transport {}: expected nccl", comm.transport()));
  }
  return *nccl;
}

GpuCommunicator::GpuCommunicator(Communicator& control, int device)
    : Communicator(control.rank(), control.size(), control.deadline()),
      control_(control),
      aborts_(control.allocate(0, 1)),
      device_(device),
      stream_(own_stream_.get()) {
  if (size_ > kMaxGpus) {
    throw InvalidArgument(fmt::format("nccl: {} ranks: expected at most {}", size_, kMaxGpus));
  }
  ncclUniqueId id{};
  if (rank_ == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const auto ids =
      control_.exchange(std::as_bytes(std::span(&id, rank_ == 0 ? 1u : 0u)), "nccl id");
  if (ids[0].size() != sizeof id) throw DeviceError("nccl id: rank 0 sent none");
  std::memcpy(&id, ids[0].data(), sizeof id);
  const std::vector<GpuPlace> places = places_of_ranks(control_, device_);
  check_own_gpus(places);
  load_modules();
  check(ncclCommInitRank(&nccl_, size_, id, rank_), "ncclCommInitRank");
  try {
    agree_on_paths(places);
  } catch (...) {
    give_up();
    throw;
  }
}

// Collective.
void GpuCommunicator::agree_on_paths(std::span<const GpuPlace> places) {
  GpuPath path = path_to_all(places, rank_, visible_gpus(),
                             [&](int other) { return path_between(device_, other); });
  // Pointers are read of NCCL's team of ranks that reach each other, which must be this world.
  path.reaches = path.reaches && lsa_team_size(nccl_) == size_;
  for (const auto& blob : control_.exchange(std::as_bytes(std::span(&path, 1)), "paths")) {
    GpuPath theirs;
    std::memcpy(&theirs, blob.data(), sizeof theirs);
    one_node_ = one_node_ && theirs.reaches;
    peer_atomics_ = peer_atomics_ && theirs.atomics;
  }
}

GpuCommunicator::~GpuCommunicator() {
  // Destroying waits for the peers; a rank that failed must not.
  if (failed_ || std::uncaught_exceptions() > 0) give_up();
  attached_.clear();  // may hold symmetric memory
  try {
    if (!failed_) free_retired();
  } catch (const Error&) {
    give_up();
  }
  // What is left nobody agrees on any more. Peers that still write to it hold mappings of their
  // own, which keep it.
  if (auto left = retired_.take_all(); !left.empty()) {
    cudaDeviceSynchronize();
    left.clear();
  }
  if (nccl_) ncclCommDestroy(nccl_);
}

// Ends NCCL's kernels, which know no deadline: whatever frees device memory next waits for them.
void GpuCommunicator::give_up() const {
  failed_ = true;
  if (nccl_) ncclCommAbort(std::exchange(nccl_, nullptr));
}

void GpuCommunicator::end_device_waits() const {
  end_waits(*record_.get());
  failed_ = true;
}

// What `call` returns. Where it throws Aborted, nothing on the device waits any more.
template <typename Call>
auto GpuCommunicator::giving_up_if_aborted(const Call& call) const {
  try {
    return call();
  } catch (const Aborted&) {
    const auto timeout = end_after_abort(*record_.get(), rank_, deadline_s_, kGrace);
    give_up();
    if (timeout) throw Timeout(*timeout);
    throw;
  }
}

void GpuCommunicator::look_for_abort() const {
  giving_up_if_aborted([&] { control_.wait(*aborts_, 0, 0, {}); });
}

std::string GpuCommunicator::link() const {
  if (size_ == 1) return "local";
  if (!one_node_) return "network";
  return peer_atomics_ ? "nvlink" : "pcie";
}

std::shared_ptr<SymmetricBuffer> GpuCommunicator::allocate(size_t bytes, int signals) {
  check_allocation(bytes, signals);
  require_same("allocate", fmt::format("{} bytes, {} signals", bytes, signals));
  free_retired();
  return std::make_shared<GpuBuffer>(*this, bytes, signals);
}

// Collective: frees what all ranks have dropped, once nobody's GPU uses it any more.
void GpuCommunicator::free_retired() {
  const std::vector<uint64_t> mine = retired_.numbers();
  const Blobs told = exchange(std::as_bytes(std::span(mine)), "free symmetric memory");
  if (in_all(told).empty()) return;
  synchronize();
  flush();
  check(cudaDeviceSynchronize(), "free symmetric memory");  // the caller's other streams
  barrier("free symmetric memory");
  retired_.take(told);
}

void GpuCommunicator::put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                           size_t bytes, int signal, uint64_t epoch) {
  check_put(size_, peer, buffer, offset, bytes, signal);
  const PeerTable& table = static_cast<GpuBuffer&>(buffer).table();
  if (!table.memory[peer]) {
    throw Unsupported(
        fmt::format("put: rank {} to rank {}: expected ranks of one node", rank_, peer));
  }
  produced_.record(stream_);
  produced_.block(copies_.get());
  if (bytes > 0) {
    check(cudaMemcpyAsync(table.memory[peer] + offset, source, bytes, cudaMemcpyDefault,
                          copies_.get()),
          "put");
  }
  write_value(copies_.get(), table.signals[peer] + signal, epoch);
}

void GpuCommunicator::flush() {
  synchronize(copies_.get(), "flush");
}

uint64_t GpuCommunicator::read_signal(const SymmetricBuffer& buffer, int signal) const {
  check_signal(buffer, signal, "read_signal");
  const PeerTable& table = static_cast<const GpuBuffer&>(buffer).table();
  check(cudaMemcpyAsync(seen_.get(), table.signals[rank_] + signal, sizeof(uint64_t),
                        cudaMemcpyDefault, polls_.get()),
        "read_signal");
  check(cudaStreamSynchronize(polls_.get()), "read_signal");
  return *seen_.get();
}

void GpuCommunicator::wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                            const WaitSite& site) {
  check_signal(buffer, signal, "wait");
  const auto begin = Clock::now();
  for (;;) {
    look_for_abort();
    const uint64_t seen = read_signal(buffer, signal);
    if (seen >= epoch) return;
    check_device();
    if (std::chrono::duration<double>(Clock::now() - begin).count() > deadline_s_) {
      give_up();
      throw Timeout(site, rank_, epoch, seen, deadline_s_);
    }
  }
}

void GpuCommunicator::abort(const std::string& reason) {
  end_device_waits();
  control_.abort(reason);
}

std::unique_ptr<Communicator> GpuCommunicator::split(int color, int key) {
  auto control = giving_up_if_aborted([&] { return control_.split(color, key); });
  auto part = std::make_unique<GpuCommunicator>(*control, device_);
  part->owned_control_ = std::move(control);
  part->set_deadline(deadline_s_);
  return part;
}

std::vector<std::vector<std::byte>> GpuCommunicator::exchange(std::span<const std::byte> blob,
                                                               std::string_view what) {
  control_.set_deadline(deadline_s_);
  return giving_up_if_aborted([&] { return control_.exchange(blob, what); });
}

void GpuCommunicator::check_device() const {
  const int state = state_of(*record_.get());
  if (state == ErrorRecord::kNone || state == ErrorRecord::kWriting) return;
  give_up();
  if (const auto timeout = timeout_in(*record_.get(), rank_, deadline_s_)) throw Timeout(*timeout);
  look_for_abort();
  throw Aborted(rank_, "abort was called");  // by this rank just now
}

void GpuCommunicator::synchronize() const {
  synchronize(stream_, "synchronize");
}

void GpuCommunicator::synchronize(cudaStream_t stream, std::string_view what) const {
  // NCCL's own kernels know no deadline, hence the host's: long enough for every device-side wait
  // of the stream to report first.
  const auto begin = Clock::now();
  for (int spin = 0;; ++spin) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) break;
    if (state != cudaErrorNotReady) check(state, "synchronize");
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    if (waited > kPatience * deadline_s_) {
      check_device();
      give_up();
      throw Timeout({what}, rank_, 0, 0, waited);
    }
    if (spin > 10000) {
      look_for_abort();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  look_for_abort();
  check_device();
}

std::vector<double> GpuCommunicator::slowest(std::span<const double> mine) {
  const auto all = exchange(std::as_bytes(mine), "slowest");
  std::vector<double> result(mine.begin(), mine.end()), theirs(mine.size());
  for (const auto& blob : all) {
    if (blob.size() != mine.size_bytes()) throw Mismatch("slowest: ranks pass different counts");
    std::memcpy(theirs.data(), blob.data(), blob.size());
    for (size_t i = 0; i < mine.size(); ++i) result[i] = std::max(result[i], theirs[i]);
  }
  return result;
}

}  // namespace tandem::gpu
