// Symmetric memory of one overlapped operator, used run after run without a barrier and without
// acknowledgements.
//
// Run e uses half e % 2 of the memory, and raises signals to e. Nothing is overwritten before it is
// read: in every run each rank waits for at least one signal of that run from every peer (puts
// without bytes if there are no rows), and sends its own only after it has begun that run. So a
// rank that begins run e has seen every peer begin run e - 1, that is, end run e - 2, the last one
// that read this half. The same argument covers the sources of this rank's puts: a peer that has
// ended run e - 2 had received all of run e - 2's puts, so their sources in this half may change. A
// source outside these halves needs a `flush` before the run ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class OverlapWorkspace {
 public:
  /// Collective. `shared_bytes` of symmetric and `private_bytes` of private memory, twice. `op`
  /// must outlive this (a literal).
  OverlapWorkspace(Communicator& comm, std::string_view op, size_t shared_bytes,
                   size_t private_bytes, int signals);
  /// Waits until no put of the last runs still reads this memory.
  ~OverlapWorkspace();
  OverlapWorkspace(const OverlapWorkspace&) = delete;
  OverlapWorkspace& operator=(const OverlapWorkspace&) = delete;

  /// Starts the next run: `shared()` and `scratch()` are now its halves.
  void begin() { ++epoch_; }
  uint64_t epoch() const { return epoch_; }
  std::byte* shared() const { return buffer_->local() + shared_offset(); }
  std::byte* scratch() const { return private_.data() + (epoch_ % 2) * private_bytes_; }

  /// Puts `source` at byte `offset` of this run's half at `peer`, then raises `signal`.
  void put(int peer, size_t offset, const void* source, size_t bytes, int signal);
  /// Returns once `signal` was raised in this run. Only actual waiting is recorded as a wait span.
  void await(int signal, int peer, int64_t tile);
  /// True if it was raised in this run.
  bool has(int signal) const { return comm_.read_signal(*buffer_, signal) >= epoch_; }
  void flush();

  Communicator& comm() const { return comm_; }

 private:
  size_t shared_offset() const { return (epoch_ % 2) * shared_bytes_; }

  Communicator& comm_;
  std::string_view op_;
  size_t shared_bytes_, private_bytes_;
  std::shared_ptr<SymmetricBuffer> buffer_;
  Memory private_;
  uint64_t epoch_ = 0;
  const uint32_t stream_;  // for arrows of a trace

  int64_t message(int signal) const { return int64_t(epoch_) << 24 | signal; }
};

}  // namespace tandem
