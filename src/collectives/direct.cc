#include "collectives/direct.h"

#include <fmt/format.h>

#include <cstring>
#include <thread>

#include "tandem/error.h"

namespace tandem::collectives {
namespace {

// The call in the upper half, 0 when closed; the number of users in the lower.
using UseCount = std::atomic_ref<uint64_t>;

constexpr uint64_t opened(uint64_t call) {
  return (call % 0xffffffff + 1) << 32;
}

bool acquire(UseCount use_count, uint64_t call) {
  uint64_t seen = use_count.load();
  while ((seen & ~0xffffffffull) == opened(call)) {
    if (use_count.compare_exchange_weak(seen, seen + 1)) return true;
  }
  return false;
}

}  // namespace

Direct::Direct(Call& call) : call_(call), tensors_(size_t(call.size())) {
  acquired_.reserve(tensors_.size());  // after acquire() nothing may throw before it is noted
  UseCount(call_.use_count(call_.rank())).store(opened(call_.number()));
}

Direct::~Direct() {
  release();
  UseCount use_count(call_.use_count(call_.rank()));
  use_count.fetch_and(0xffffffff);
  while (use_count.load() != 0) std::this_thread::yield();
}

void Direct::release() {
  for (const int peer : acquired_) UseCount(call_.use_count(peer)).fetch_sub(1);
  acquired_.clear();
}

void Direct::enter(const void* tensor, size_t sent) {
  const auto address = reinterpret_cast<uintptr_t>(tensor);
  call_.enter_all(std::as_bytes(std::span(&address, 1)), sizeof address);
  call_.count_sent(sent);
  call_.check();
  tensors_[size_t(call_.rank())] = reinterpret_cast<std::byte*>(address);
  for (int step = 1; step < call_.size(); ++step) {
    const int peer = call_.peer(step);
    if (!acquire(UseCount(call_.use_count(peer)), call_.number())) {
      call_.find_left(peer);
    }
    acquired_.push_back(peer);
    uintptr_t remote;
    std::memcpy(&remote, call_.payload(peer), sizeof remote);
    tensors_[size_t(peer)] = reinterpret_cast<std::byte*>(remote);
  }
}

void Direct::finish() {
  release();
  call_.leave_all();
}

}  // namespace tandem::collectives
