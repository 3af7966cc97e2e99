// The gather under AG+GEMM and the weight gradient, on GPUs of one node: the copy engine pushes
// this rank's shard to the others in ring order, one transfer and one signal each, on a stream of
// its own. Shards cross into a symmetric buffer that is written again only after every rank has
// entered the next call. Nothing waits on the host; a captured graph can be replayed.
//
// A kernel may carry the shards itself instead (shard_route.h), with signals and an epoch of its
// own, in the same buffer; calls of any kind may follow each other.
#pragma once

#include <memory>
#include <vector>

#include "comm/device/gpu_communicator.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/common_stream.h"
#include "overlap/contract/cuda/ways.h"
#include "overlap/gather/cuda/shard_route.h"
#include "schedule/ring.h"
#include "tandem/collectives.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// Where ranks wait for each other to have entered a call.
enum class Entering {
  beside,  ///< on the pushing stream: the own shard's product starts at once, and the reader counts
           ///< its epochs itself, by `await`
  before,  ///< on the communicator's stream: a kernel that fills the GPU cannot then start before
           ///< the one that it waits for
};

class ShardPushes {
 public:
  /// Collective. The gathered matrix is [rows, columns], split by shard_of(). With `keep_own`, the
  /// own rows are copied into it too, behind the pushes. With `row_scales` a scale of each row
  /// travels with its shard, and every call must be given the own ones.
  ShardPushes(GpuCommunicator& comm, OpId op, int64_t rows, int64_t columns, DType dtype,
              bool keep_own, bool row_scales = false);

  /// Begins a call of more than one rank. `end` must follow.
  void begin(const Tensor& x, Entering entering, const Tensor* scales = nullptr) {
    start(x, scales, entering, keep_own_);
  }
  /// The communicator's stream goes on once the pushes have read their source.
  void end();

  /// A whole call, by shards: enqueues what `body(source, rows, data)` does with the rows of rank
  /// `source`, which are at `data`, in ring order: the own ones, in place, and each other shard
  /// once it is here.
  template <typename Body>
  void for_each_shard(const Tensor& x, const Tensor* scales, const Body& body) {
    const int ranks = comm_.size();
    if (ranks > 1) begin(x, Entering::beside, scales);
    body(comm_.rank(), mine_, x.data());
    for (int step = 1; step < ranks; ++step) {
      const int source = schedule::ag_source(comm_.rank(), ranks, step);
      const Shard shard = shard_of(rows_, ranks, source);
      await(source, step == 1);
      body(source, shard, rows(comm_.rank(), shard.begin));
    }
    if (ranks > 1) end();
  }

  /// The whole gather by a serial way or `plain`; returns where the gathered matrix is.
  const void* gather(Way way, const Tensor& x, const Tensor* scales = nullptr);
  /// One rank: x is all there is.
  void keep_alone(const Tensor& x);

  Shard mine() const { return mine_; }
  /// Rows from `row` on, in the memory of rank `at`.
  std::byte* rows(int at, int64_t row) const;
  float* row_scales(int at, int64_t row) const;
  Tensor gathered() const;

  /// Begin and end of each transfer of the calls from now on, in the order of `target`; null: no
  /// more.
  void time(std::vector<Event>* times) { times_ = times; }
  bool is_timed() const { return times_ != nullptr; }
  /// Whom the transfer number `step` of a call goes to.
  int target(int step) const { return schedule::ag_target(comm_.rank(), comm_.size(), step + 1); }

  /// For kernels that wait themselves, after `begin` with Entering::before.
  ShardGate gate() const;
  /// For kernels that carry `x` themselves, and what their readers wait for. Nothing else of this
  /// class is called for such a call.
  ShardRoute route(const Tensor& x, const Tensor* scales) const;
  /// Of the shorter shards; those that have a row more count one more.
  ShardGate route_gate() const;

 private:
  void start(const Tensor& x, const Tensor* scales, Entering entering, bool keep_own);
  void push(const Tensor& x, const Tensor* scales, int step);
  void copy_own(const Tensor& x, const Tensor* scales, cudaStream_t stream);
  // The communicator's stream goes on once the shard of rank `source`, or of every other, is here.
  // `first`: the first wait of this call.
  void await(int source, bool first);
  // In device memory, zero at first.
  struct Words {
    // Of the pushing and of the multiplying stream; what peers that have entered are signalled.
    uint64_t pushed, awaited, signal_value[kMaxGpus];
    CallCounter routes;  // of kernels that carry x themselves
  };
  Words& words() const { return *reinterpret_cast<Words*>(words_.data()); }
  int row_bytes() const { return int(columns_ * int64_t(size_of(dtype_))); }
  // What depends on others' waits gives up after them: those name who is really missing.
  Watch patient() const { return gpu::patient(comm_.watch()); }

  GpuCommunicator& comm_;
  OpId op_;
  int64_t rows_, columns_;
  DType dtype_;
  bool keep_own_, row_scales_;
  Shard mine_;
  size_t scales_at_;  // in the buffer: bytes of its rows, rounded up
  std::shared_ptr<GpuBuffer> buffer_;
  DeviceMemory words_;
  CommonStream side_{Common::side};
  PacedCopies paced_;
  Event begun_, pushed_;
  std::vector<Event>* times_ = nullptr;
};

}  // namespace tandem::gpu
