#include "comm/nccl/nccl_communicator.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/arguments.h"
#include "comm/nccl/stream_memory.h"

namespace tandem::gpu {

using Clock = std::chrono::steady_clock;

namespace {

// In deadlines: a call's device-side waits end within two and a quarter (patient()).
constexpr double kPatience = 3;
constexpr std::chrono::milliseconds kGrace{100};

// What NCCL, too, tells nodes apart by. A GPU that cannot map another one is a node of its own, and
// so is the only one that a process sees, as it cannot be asked.
std::string this_node(int rank, int device) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count GPUs");
  if (devices == 1) return fmt::format("rank {}", rank);
  for (int other = 0; other < devices; ++other) {
    int reaches = 1;
    if (other != device) check(cudaDeviceCanAccessPeer(&reaches, device, other), "peer access");
    if (!reaches) return fmt::format("rank {}", rank);
  }
  if (const char* id = std::getenv("NCCL_HOSTID")) return id;
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::vector<std::string> texts_of_ranks(Communicator& control, const std::string& mine,
                                        std::string_view what) {
  std::vector<std::string> texts;
  for (const auto& blob :
       control.exchange(std::as_bytes(std::span(mine.data(), mine.size())), what)) {
    texts.emplace_back(reinterpret_cast<const char*>(blob.data()), blob.size());
  }
  return texts;
}

// The same in every process, however each numbers its GPUs. Zeros where the driver does not say.
std::string this_gpu(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "device properties");
  std::string id;
  for (const char byte : properties.uuid.bytes) id += fmt::format("{:02x}", uint8_t(byte));
  return id;
}

void check_own_gpus(const std::vector<std::string>& of_ranks) {
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto first = size_t(std::ranges::find(of_ranks, of_ranks[rank]) - of_ranks.begin());
    const bool known = of_ranks[rank].find_first_not_of('0') != std::string::npos;
    if (first == rank || !known) continue;
    throw InvalidArgument(
        fmt::format("nccl: ranks {} and {} have the same GPU {}: expected one each", first, rank,
                    of_ranks[rank]));
  }
}

}  // namespace

void check(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  throw DeviceError(
      fmt::format("{}: {} ({})", what, ncclGetErrorString(code), ncclGetLastError(nullptr)));
}

NcclCommunicator& as_nccl(Communicator& comm) {
  auto* nccl = dynamic_cast<NcclCommunicator*>(&comm);
  if (!nccl) {
    throw InvalidArgument(
        fmt::format("communicator: transport {}: expected nccl", comm.transport()));
  }
  return *nccl;
}

NcclCommunicator::NcclCommunicator(Communicator& control, int device)
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
  const std::string node = this_node(rank_, device_);
  one_node_ = std::ranges::all_of(texts_of_ranks(control_, node, "node"),
                                  [&](const std::string& theirs) { return theirs == node; });
  check_own_gpus(texts_of_ranks(control_, this_gpu(device_), "GPU"));
  check(ncclCommInitRank(&nccl_, size_, id, rank_), "ncclCommInitRank");
}

NcclCommunicator::~NcclCommunicator() {
  attached_.clear();  // may hold symmetric memory
  // Destroying waits for the peers; a rank that failed must not.
  if (std::uncaught_exceptions() > 0) give_up();
  if (nccl_) ncclCommDestroy(nccl_);
}

// Ends NCCL's kernels, which know no deadline: whatever frees device memory next waits for them.
void NcclCommunicator::give_up() const {
  failed_ = true;
  if (nccl_) ncclCommAbort(std::exchange(nccl_, nullptr));
}

void NcclCommunicator::end_device_waits() const {
  reinterpret_cast<volatile int&>(record_.get()->state) = ErrorRecord::kAborted;
  failed_ = true;
}

// What `call` returns. Where it throws Aborted, nothing on the device waits any more.
template <typename Call>
auto NcclCommunicator::giving_up_if_aborted(const Call& call) const {
  try {
    return call();
  } catch (const Aborted&) {
    // Who aborted may have waited in vain for a rank that this one's GPU waits for, too, and which
    // it is about to name.
    const auto until = Clock::now() + kGrace;
    while (device_state() == ErrorRecord::kNone && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    end_device_waits();
    give_up();
    if (device_state() == ErrorRecord::kTimeout) throw device_timeout();
    throw;
  }
}

int NcclCommunicator::device_state() const {
  return reinterpret_cast<const volatile int&>(record_.get()->state);
}

Timeout NcclCommunicator::device_timeout() const {
  const ErrorRecord& record = *record_.get();
  return Timeout({name_of(OpId(record.op)), record.peer, record.tile}, rank_, record.epoch,
                 record.seen, deadline_s_);
}

void NcclCommunicator::look_for_abort() const {
  giving_up_if_aborted([&] { control_.wait(*aborts_, 0, 0, {}); });
}

std::string NcclCommunicator::link() const {
  if (size_ == 1) return "local";
  if (!one_node_) return "network";
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count GPUs");
  for (int other = 0; other < devices; ++other) {
    int atomics = 0;
    if (other == device_) continue;
    check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device_, other),
          "peer attributes");
    return atomics ? "nvlink" : "pcie";
  }
  return "peer";
}

std::shared_ptr<SymmetricBuffer> NcclCommunicator::allocate(size_t bytes, int signals) {
  check_allocation(bytes, signals);
  require_same("allocate", fmt::format("{} bytes, {} signals", bytes, signals));
  return std::make_shared<NcclBuffer>(*this, bytes, signals);
}

void NcclCommunicator::put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                           size_t bytes, int signal, uint64_t epoch) {
  check_put(size_, peer, buffer, offset, bytes, signal);
  const PeerTable& table = static_cast<NcclBuffer&>(buffer).table();
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

void NcclCommunicator::flush() {
  synchronize(copies_.get(), "flush");
}

uint64_t NcclCommunicator::read_signal(const SymmetricBuffer& buffer, int signal) const {
  check_signal(buffer, signal, "read_signal");
  const PeerTable& table = static_cast<const NcclBuffer&>(buffer).table();
  check(cudaMemcpyAsync(seen_.get(), table.signals[rank_] + signal, sizeof(uint64_t),
                        cudaMemcpyDefault, polls_.get()),
        "read_signal");
  check(cudaStreamSynchronize(polls_.get()), "read_signal");
  return *seen_.get();
}

void NcclCommunicator::wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
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

void NcclCommunicator::abort(const std::string& reason) {
  end_device_waits();
  control_.abort(reason);
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  auto control = giving_up_if_aborted([&] { return control_.split(color, key); });
  auto part = std::make_unique<NcclCommunicator>(*control, device_);
  part->owned_control_ = std::move(control);
  part->set_deadline(deadline_s_);
  return part;
}

std::vector<std::vector<std::byte>> NcclCommunicator::exchange(std::span<const std::byte> blob,
                                                               std::string_view what) {
  control_.set_deadline(deadline_s_);
  return giving_up_if_aborted([&] { return control_.exchange(blob, what); });
}

void NcclCommunicator::check_device() const {
  const int state = device_state();
  if (state == ErrorRecord::kNone || state == ErrorRecord::kWriting) return;
  give_up();
  if (state == ErrorRecord::kAborted) {
    look_for_abort();
    throw Aborted(rank_, "abort was called");  // by this rank just now
  }
  throw device_timeout();
}

void NcclCommunicator::synchronize() const {
  synchronize(stream_, "synchronize");
}

void NcclCommunicator::synchronize(cudaStream_t stream, std::string_view what) const {
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

std::vector<double> NcclCommunicator::slowest(std::span<const double> mine) {
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
