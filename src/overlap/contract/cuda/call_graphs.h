// CUDA graphs of an operator's calls: a repeated call that needs many driver calls costs the host
// as much as one launch. The work that a call enqueues depends only on the operator and the fields
// of Call; epochs are in device memory, and operands are read when it runs. The first call of a
// kind is enqueued directly, the second is captured, and from then on the graph is launched. The
// least recently used of `kMaxGraphs` is dropped for a new one: callers whose addresses never
// repeat pay only the look-up.
//
// A graph's kernels are given addresses, but its copies are bound to the allocation that they were
// captured with: the driver crashes if one is launched whose memory was freed, even if a new
// allocation has the same address. So the key includes the allocations that copies read, and the
// graph of a freed one is never launched again; memory that is reallocated for every two calls
// costs a capture each time. Memory not allocated by CUDA has no such identity: calls that copy
// from it are enqueued each time, as are those on a stream whose priority differs from the
// communicator's initial one, which the graphs keep.
//
// Each rank decides independently: peers cannot distinguish a launched graph from driver calls.
// Calls that a caller captures are captured into that graph directly.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "comm/device/gpu_communicator.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/graph.h"
#include "tune/candidate.h"

namespace tandem::gpu {

class CallGraphs {
 public:
  /// Layers that share an operator have different weights.
  static constexpr size_t kMaxGraphs = 128;

  /// Everything in which calls of one operator differ.
  struct Call {
    size_t candidate;  ///< its number
    const Operands& operands;
    std::array<const Tensor*, 2> copied = {};  ///< operands read by copies, not only by kernels
  };

  /// Must be destroyed after the buffers that its graphs use, which wait for calls in flight.
  explicit CallGraphs(GpuCommunicator& comm);
  /// Enqueues the work of `enqueue` for `call` on the communicator's stream.
  void run(const Call& call, const std::function<void()>& enqueue);
  /// A candidate's `run` as as_call's (dense.h), whose repeated calls are launched as graphs.
  /// `copied(operands)`: those that copies read.
  template <typename Step, typename Copied>
  auto as_call(size_t candidate, Step step, Copied copied) {
    return [this, candidate, step = std::move(step), copied](const Operands& o) {
      comm_.check_device();
      const Enqueueing call(comm_);
      run({candidate, o, copied(o)}, [&] { step(o); });
    };
  }
  /// While set, every call is enqueued, for a timeline.
  void enqueue_all(bool all) { enqueue_all_ = all; }

 private:
  using Key = std::array<uint64_t, 11>;
  struct Entry {
    std::optional<Graph> graph;
    uint64_t used = 0;
  };

  /// None if a copied operand has no identity.
  std::optional<Key> key_of(const Call& call) const;
  Graph capture(const std::function<void()>& enqueue);
  void drop_oldest();

  GpuCommunicator& comm_;
  Priority priority_;
  // Capture stream, of `priority_`: the caller's stream may not be capturable.
  std::optional<CommonStream> common_;
  std::optional<Stream> local_;
  std::map<Key, Entry> calls_;
  uint64_t uses_ = 0;
  bool enqueue_all_ = false;
};

}  // namespace tandem::gpu
