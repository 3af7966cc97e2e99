// Symmetric buffer of ranks that are processes: one allocation, signals first, shared with the
// ranks of this host.
#pragma once

#include <vector>

#include "comm/processes/engine.h"
#include "comm/processes/shared_memory.h"
#include "tandem/communicator.h"

namespace tandem::processes {

struct BufferLayout {
  size_t bytes;
  int signals;
  size_t data_at() const { return (size_t(signals) * sizeof(uint64_t) + 4095) / 4096 * 4096; }
  size_t total() const { return data_at() + bytes; }
};

class ProcessBuffer final : public SymmetricBuffer {
 public:
  /// `memory`: by rank; null for ranks reached by messages.
  ProcessBuffer(Engine& engine, uint64_t communicator, uint64_t number, int rank,
                const BufferLayout& layout, std::vector<std::shared_ptr<SharedMemory>> memory)
      : engine_(engine),
        communicator_(communicator),
        number_(number),
        data_at_(layout.data_at()),
        memory_(std::move(memory)) {
    const auto& local = memory_[size_t(rank)];
    bytes_ = layout.bytes;
    signals_ = layout.signals;
    local_ = peer(rank);
    engine_.add_buffer(communicator_, number_,
                       std::make_shared<LocalBuffer>(
                           LocalBuffer{local_, reinterpret_cast<uint64_t*>(local->data()), local}));
  }
  ~ProcessBuffer() override { engine_.remove_buffer(communicator_, number_); }

  std::byte* peer(int rank) const override {
    const auto& memory = memory_[size_t(rank)];
    return memory ? memory->data() + data_at_ : nullptr;
  }
  uint64_t& signal(int rank, int index) const {
    return reinterpret_cast<uint64_t*>(memory_[size_t(rank)]->data())[index];
  }
  uint64_t number() const { return number_; }

 private:
  Engine& engine_;
  uint64_t communicator_, number_;
  size_t data_at_;
  std::vector<std::shared_ptr<SharedMemory>> memory_;
};

}  // namespace tandem::processes
