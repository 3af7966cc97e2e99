#include "comm/one_gpu/one_gpu_communicator.h"

#include <fmt/format.h>

#include <cstring>
#include <iterator>

#include "core/cuda/modules.h"
#include "core/cuda/stack.h"

namespace tandem::gpu {
namespace {

struct OneGpuMemory final : SymmetricMemory {
  DeviceMemory memory, signals;
};

}  // namespace

OneGpuCommunicator::OneGpuCommunicator(Communicator& control, OneGpuWorld& world)
    : GpuCommunicator(control), world_(world) {
  if (size_ > kMaxGpus) {
    throw InvalidArgument(fmt::format("one_gpu: {} ranks: expected at most {}", size_, kMaxGpus));
  }
  load_modules();
  grow_stack(stream());
  barrier("one_gpu");  // both wait for the device
  pairs_ = std::make_unique<PairExchange>(*this);
}

OneGpuCommunicator::~OneGpuCommunicator() {
  pairs_.reset();
  end();
}

std::string OneGpuCommunicator::link() const {
  return size_ == 1 ? "local" : "same-gpu";
}

std::shared_ptr<GpuBuffer> OneGpuCommunicator::do_allocate(size_t bytes, int signals) {
  auto owned = std::make_unique<OneGpuMemory>();
  agree_on("allocate", [&] {
    owned->memory = DeviceMemory(bytes);
    owned->signals = DeviceMemory(size_t(signals) * sizeof(uint64_t));
  });
  PeerTable table;
  table.rank = rank_;
  table.size = size_;
  std::byte* const mine[2] = {owned->memory.data(), owned->signals.data()};
  const auto addresses = exchange(std::as_bytes(std::span(mine)), "allocate");
  for (int r = 0; r < size_; ++r) {
    std::byte* theirs[2];
    std::memcpy(theirs, addresses[size_t(r)].data(), sizeof theirs);
    table.memory[r] = theirs[0];
    table.signals[r] = reinterpret_cast<uint64_t*>(theirs[1]);
  }
  return std::make_shared<GpuBuffer>(*this, bytes, signals, std::move(owned), table);
}

std::unique_ptr<GpuCommunicator> OneGpuCommunicator::do_split(Communicator& control) {
  return std::make_unique<OneGpuCommunicator>(control, world_);
}

void OneGpuCommunicator::abandon(std::vector<OwnedSymmetric> left) {
  world_.keep(std::move(left));
}

OneGpuCommunicator* as_one_gpu(GpuCommunicator& comm) {
  return dynamic_cast<OneGpuCommunicator*>(&comm);
}

}  // namespace tandem::gpu
