// An operator's calls as graphs: a call that takes many calls of the driver costs the host as much
// as one launch when it comes again. Which work a call enqueues depends on the operator and on what
// a Call has; epochs are in device memory, and operands are read when it runs. So the first call of
// its kind is enqueued as it is, the second one is captured, and from then on the graph is
// launched. The least recently used of `kKept` is dropped for a new one: callers whose addresses
// never come again pay nothing but the look-up.
//
// A graph's kernels are given addresses, but its copies are bound to the allocation that they were
// captured with: the driver crashes when one is launched whose memory was freed, even where a new
// allocation lies in its place. So calls differ by the allocations that their copies read, too, and
// the graph of one that was freed is never launched again; memory that is allocated anew for every
// two calls costs a capture each time. Memory that CUDA did not allocate has no such identity:
// calls that copy from it are enqueued each time, as are those on a stream of another priority than
// the communicator's had at first, which the graphs keep.
//
// A rank decides for itself: peers cannot tell a launched graph from calls of the driver. Calls
// that a caller captures go into that graph as they are.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "comm/device/gpu_communicator.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/graph.h"
#include "overlap/contract/cuda/ways.h"
#include "tandem/quantize.h"

namespace tandem::gpu {

class CallGraphs {
 public:
  /// Layers that share an operator have weights of their own.
  static constexpr size_t kKept = 128;

  /// All that calls of one operator differ by.
  struct Call {
    Way way;
    const Tensor &x, &weight, &out;
    const Tensor* bias = nullptr;
    const Scales* scales = nullptr;
    std::array<const Tensor*, 2> copied = {};  ///< operands that copies read, not kernels alone
    int variant = 0;                           ///< of a fused way
  };

  /// Must be destroyed after the buffers that its graphs use, which wait for calls under way.
  explicit CallGraphs(GpuCommunicator& comm);
  /// What `enqueue` puts on the communicator's stream for `call`, on it.
  void run(const Call& call, const std::function<void()>& enqueue);

 private:
  using Key = std::array<uint64_t, 11>;
  struct Entry {
    std::optional<Graph> graph;
    uint64_t used = 0;
  };

  /// None where a copied operand has no identity.
  std::optional<Key> key_of(const Call& call) const;
  Graph capture(const std::function<void()>& enqueue);
  void drop_oldest();

  GpuCommunicator& comm_;
  Priority priority_;
  // Captured on: the caller's may be one that cannot be. Of `priority_`.
  std::optional<CommonStream> common_;
  std::optional<Stream> own_;
  std::map<Key, Entry> calls_;
  uint64_t uses_ = 0;
};

}  // namespace tandem::gpu
