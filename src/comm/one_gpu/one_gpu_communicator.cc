#include "comm/one_gpu/one_gpu_communicator.h"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>

#include "core/cuda/current_device.h"
#include "core/cuda/graph.h"
#include "core/cuda/modules.h"
#include "core/cuda/stack.h"
#include "core/system/process/thread_stacks.h"

namespace tandem::gpu {
namespace {

constexpr int kSpins = 20000;

// Data that ranks exchange about a new communicator.
struct Introduction {
  Meetings* meetings;  // rank 0's
  int team;
};

struct OneGpuMemory final : SymmetricMemory {
  DeviceMemory memory, signals;
};

}  // namespace

OneGpuCommunicator::OneGpuCommunicator(Communicator& control, std::shared_ptr<OneGpuWorld> world,
                                       int team, std::shared_ptr<OwnedLinkPacer> link_pacer,
                                       std::shared_ptr<WorldState> state)
    : GpuCommunicator(control, std::move(state)),
      world_(std::move(world)),
      team_(team),
      owned_link_pacer_(std::move(link_pacer)) {
  if (size_ > kMaxSharing) {
    throw InvalidArgument(
        fmt::format("one_gpu: {} ranks: expected at most {}", size_, kMaxSharing));
  }
  const Introduction local{rank_ == 0 ? world_->new_meetings() : nullptr, team};
  const auto exchanged = exchange(std::as_bytes(std::span(&local, 1)), "one_gpu");
  for (size_t r = 0; r < exchanged.size(); ++r) {
    Introduction remote;
    std::memcpy(&remote, exchanged[r].data(), sizeof remote);
    if (r == 0) meetings_ = remote.meetings;
    one_node_ = one_node_ && remote.team == team;
  }
  meetings_->threads[size_t(rank_)] = this_thread_id();
  load_modules();
  grow_stack(stream());
  if (!owned_link_pacer_ && world_->link()) {
    owned_link_pacer_ = std::make_shared<OwnedLinkPacer>(*world_->link(), device_deadline().record);
  }
  if (owned_link_pacer_) use(*owned_link_pacer_);
  barrier("one_gpu");  // a barrier: both of the above may wait for the device
  pairs_ = std::make_unique<PairExchange>(*this);
}

OneGpuCommunicator::~OneGpuCommunicator() {
  const CurrentDevice here(device());
  pairs_.reset();
  end();
}

std::string OneGpuCommunicator::link() const {
  if (size_ == 1) return "local";
  return world_->link() ? world_->link()->describe() + " same-gpu" : "same-gpu";
}

void OneGpuCommunicator::prepare(const std::function<void()>& step) {
  meetings_->threads[size_t(rank_)] = this_thread_id();
  if (prepared_ || size_ == 1 || is_captured(stream())) return;
  prepared_ = true;
  if (step) {
    const cudaStream_t before = stream();
    set_stream(rehearsals_.get());
    try {
      const Graph loads_kernels(rehearsals_.get(), step);
      loads_kernels.upload(rehearsals_.get());
    } catch (const Error&) {  // the call itself will report it
    }
    set_stream(before);
  }
  await_all();
}

void OneGpuCommunicator::enqueued() noexcept {
  if (prepared_) await_all();
  prepared_ = false;
}

void OneGpuCommunicator::await_all() noexcept {
  meetings_->of[size_t(rank_)].store(++met_);
  const auto came = [&](int rank) { return meetings_->of[size_t(rank)].load() >= met_; };
  const auto begin = std::chrono::steady_clock::now();
  for (int rank = 0, spins = 0; rank < size_ && together_; ++spins) {
    if (came(rank)) {
      ++rank;
    } else if (spins > kSpins) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      note_late(took.count());
      together_ = took.count() < deadline_s_ && !aborted();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

std::string OneGpuCommunicator::where_ranks_are() const {
  std::string all;
  for (int rank = 0; rank < size_; ++rank) {
    const pid_t thread = meetings_->threads[size_t(rank)];
    const std::string stack = thread == 0 ? "" : stack_of_thread(thread);
    all += fmt::format("{}rank {} has made {} calls and is {}", rank == 0 ? "" : "; ", rank,
                       meetings_->of[size_t(rank)].load(),
                       stack.empty() ? std::string("elsewhere") : "in " + stack);
  }
  return all;
}

// The next call or wait reports the cause.
bool OneGpuCommunicator::aborted() const noexcept {
  try {
    look_for_abort();
  } catch (const Error&) {
    return true;
  }
  return failed();
}

std::shared_ptr<GpuBuffer> OneGpuCommunicator::do_allocate(size_t bytes, int signals) {
  auto owned = std::make_unique<OneGpuMemory>();
  agree_on("allocate", [&] {
    owned->memory = DeviceMemory(bytes);
    owned->signals = DeviceMemory(size_t(signals) * sizeof(uint64_t));
  });
  std::vector<RankMemory> memories{size_t(size_)};
  const RankMemory local{owned->memory.data(), reinterpret_cast<uint64_t*>(owned->signals.data())};
  const auto addresses = exchange(std::as_bytes(std::span(&local, 1)), "allocate");
  for (size_t r = 0; r < memories.size(); ++r) {
    std::memcpy(&memories[r], addresses[r].data(), sizeof memories[r]);
  }
  return std::make_shared<GpuBuffer>(*this, bytes, signals, std::move(owned), std::move(memories));
}

std::unique_ptr<GpuCommunicator> OneGpuCommunicator::do_split(Communicator& control) {
  return std::make_unique<OneGpuCommunicator>(control, world_, team_, owned_link_pacer_,
                                              world_state());
}

void OneGpuCommunicator::abandon(std::vector<OwnedSymmetric> left) {
  world_->keep(std::move(left));
}

OneGpuCommunicator* as_one_gpu(GpuCommunicator& comm) {
  return dynamic_cast<OneGpuCommunicator*>(&comm);
}

}  // namespace tandem::gpu
