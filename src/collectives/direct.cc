#include "collectives/direct.h"

#include <fmt/format.h>

#include <cstring>
#include <thread>

#include "tandem/error.h"

namespace tandem::collectives {
namespace {

// Gate word: the call in the upper half, 0 when closed; number of holders in the lower.
using Gate = std::atomic_ref<uint64_t>;

constexpr uint64_t opened(uint64_t call) {
  return (call % 0xffffffff + 1) << 32;
}

bool hold(Gate gate, uint64_t call) {
  uint64_t seen = gate.load();
  while ((seen & ~0xffffffffull) == opened(call)) {
    if (gate.compare_exchange_weak(seen, seen + 1)) return true;
  }
  return false;
}

}  // namespace

Direct::Direct(Call& call) : call_(call), tensors_(size_t(call.size())) {
  Gate(call_.gate(call_.rank())).store(opened(call_.number()));
}

Direct::~Direct() {
  let_go();
  Gate gate(call_.gate(call_.rank()));
  gate.fetch_and(0xffffffff);
  while (gate.load() != 0) std::this_thread::yield();
}

void Direct::let_go() {
  for (const int peer : held_) Gate(call_.gate(peer)).fetch_sub(1);
  held_.clear();
}

void Direct::enter(const void* tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor);
  call_.enter_all(std::as_bytes(std::span(&address, 1)));
  call_.check();
  tensors_[size_t(call_.rank())] = reinterpret_cast<std::byte*>(address);
  for (int step = 1; step < call_.size(); ++step) {
    const int peer = call_.peer(step);
    if (!hold(Gate(call_.gate(peer)), call_.number())) {
      call_.find_left(peer);
    }
    held_.push_back(peer);
    uintptr_t remote;
    std::memcpy(&remote, call_.payload(peer), sizeof remote);
    tensors_[size_t(peer)] = reinterpret_cast<std::byte*>(remote);
  }
}

void Direct::finish() {
  let_go();
  call_.leave_all();
}

}  // namespace tandem::collectives
