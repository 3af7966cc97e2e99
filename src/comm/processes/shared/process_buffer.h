// Symmetric buffer of ranks that are processes: signals, then data, in one
// allocation that the ranks of a host share.
#pragma once

#include <vector>

#include "comm/processes/engine.h"
#include "comm/processes/shared/shared_memory.h"
#include "tandem/communicator.h"

namespace tandem::processes {

struct BufferLayout {
  size_t bytes;
  int signals;
  size_t data_at() const { return (size_t(signals) * sizeof(uint64_t) + 4095) / 4096 * 4096; }
  /// Bytes of a rank, whole pages.
  size_t total() const { return data_at() + (bytes + 4095) / 4096 * 4096; }
};

class ProcessBuffer final : public SymmetricBuffer {
 public:
  /// `memory`: of the ranks of this host, one after another. `bases`: theirs, by rank; null for
  /// ranks reached by messages.
  ProcessBuffer(Engine& engine, uint64_t communicator, uint64_t number, int rank,
                const BufferLayout& layout, std::shared_ptr<SharedMemory> memory,
                std::vector<std::byte*> bases)
      : engine_(engine),
        communicator_(communicator),
        number_(number),
        data_at_(layout.data_at()),
        memory_(std::move(memory)),
        bases_(std::move(bases)) {
    bytes_ = layout.bytes;
    signals_ = layout.signals;
    local_ = peer(rank);
    engine_.add_buffer(communicator_, number_,
                       std::make_shared<LocalBuffer>(LocalBuffer{
                           local_, reinterpret_cast<uint64_t*>(bases_[size_t(rank)]), memory_}));
  }
  ~ProcessBuffer() override { engine_.remove_buffer(communicator_, number_); }

  std::byte* peer(int rank) const override {
    std::byte* base = bases_[size_t(rank)];
    return base ? base + data_at_ : nullptr;
  }
  uint64_t& signal(int rank, int index) const {
    return reinterpret_cast<uint64_t*>(bases_[size_t(rank)])[index];
  }
  uint64_t number() const { return number_; }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  /// Prevents further opens; mappings remain valid.
  void seal() { memory_->seal(); }

 private:
  Engine& engine_;
  uint64_t communicator_, number_;
  size_t data_at_;
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::byte*> bases_;
};

}  // namespace tandem::processes
